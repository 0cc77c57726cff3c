"""Which requests run next: pure bookkeeping, with no thread, no clock, no torch and no Triton in it."""

from triton_diffusion.scheduling.request_scheduler import RequestScheduler
from triton_diffusion.scheduling.scheduler import Scheduler, Wave
from triton_diffusion.scheduling.step_scheduler import StepScheduler
from triton_diffusion.scheduling.waiting_queue import WaitingQueue

__all__ = ["RequestScheduler", "Scheduler", "StepScheduler", "WaitingQueue", "Wave"]
