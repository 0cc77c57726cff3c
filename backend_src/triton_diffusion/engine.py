"""The engine: requests come in, waves run, every request is answered."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

from triton_diffusion.batch import DiffusionRequestBatch
from triton_diffusion.errors import EngineStoppedError, QueueFullError, as_error
from triton_diffusion.model_runner import ModelRunner, StepProgress
from triton_diffusion.output import BatchRunnerOutput, DiffusionOutput
from triton_diffusion.pending import PendingRequest
from triton_diffusion.receipt import Receipt
from triton_diffusion.reply import Reply
from triton_diffusion.request import OmniDiffusionRequest
from triton_diffusion.sampling_params_key import SamplingParamsKey
from triton_diffusion.scheduling import Scheduler, Wave
from triton_diffusion.wave_log import WaveLog

logger = logging.getLogger(__name__)

SWEEP_SECONDS = 0.1
"""How often the waiting requests are asked whether somebody still waits for them."""


def no_observer(engine: DiffusionEngine) -> None:
    """Called after each step where nobody wants to know."""


def never() -> bool:
    """No, it must not stop."""
    return False


class DiffusionEngine:
    """Runs requests on a thread of its own; a second thread sends the answers.

    Args:
        runner: runs the scheduled requests; used by the engine's thread alone.
        scheduler: decides which requests take the next step: the mode of the engine.
        after_step: called with the engine after each of its steps.
        must_stop: asked between steps; once it says so, every request that is left is answered with an error.
    """

    def __init__(
        self,
        runner: ModelRunner,
        scheduler: Scheduler[SamplingParamsKey],
        after_step: Callable[[DiffusionEngine], None] = no_observer,
        must_stop: Callable[[], bool] = never,
    ) -> None:
        self.runner = runner
        self.scheduler = scheduler
        self.after_step = after_step
        self.must_stop = must_stop
        self.num_steps = 0
        self._pending: dict[str, PendingRequest] = {}
        self._wave_log = WaveLog()
        self._next_sweep = 0.0
        self._changed = threading.Condition()  # guards the scheduler, _pending and _stopping
        self._stopping = False
        # Encoding and sending pictures must not hold up the next forward pass.
        self._responder = ThreadPoolExecutor(1, thread_name_prefix="diffusion-responder")
        # But when pictures are made faster than sent, they must not pile up.
        self._unsent = threading.BoundedSemaphore(2 * scheduler.max_num_running_reqs)
        self._worker = threading.Thread(target=self._run, name="diffusion-engine", daemon=True)

    def start(self) -> None:
        self._worker.start()

    def add_requests(self, arrivals: Sequence[tuple[OmniDiffusionRequest, Reply]]) -> None:
        """Let requests wait for their turn, all at once so that they can run in one wave. Never raises."""
        with self._changed:
            for request, reply in arrivals:
                try:
                    self._add(request, reply)
                except Exception as error:
                    reply.fail(error)
            self._changed.notify()

    def progress(self) -> dict[str, StepProgress]:
        """How far every request is, by request id; those that wait are at step 0."""
        with self._changed:
            waiting = {
                name: StepProgress(0, pending.request.sampling_params.num_inference_steps or 0)
                for name, pending in self._pending.items()
            }
        return {**waiting, **self.runner.progress()}

    def shutdown(self) -> None:
        """Stop after the step that runs now; every request that is left is answered with an error."""
        with self._changed:
            self._stopping = True
            self._changed.notify()
        if self._worker.ident is not None:
            self._worker.join()
        self._fail(list(self._pending), EngineStoppedError("the model is being unloaded"))
        self._responder.shutdown(wait=True)

    def step(self) -> None:
        """Schedule, run, answer."""
        wave = self._schedule()
        if wave is not None:
            outputs = self.runner.execute(DiffusionRequestBatch([self._pending[n].request for n in wave.request_ids]))
            self._note_step(wave, outputs)
            for request_id, output in outputs.items():
                self._answer(request_id, output)
        for request_id, output in self.runner.decode():
            self._answer(request_id, output)

    def _run(self) -> None:
        while self._wait_for_work():
            try:
                if self.must_stop():
                    self._fail(list(self._pending), EngineStoppedError("the server is shutting down"))
                else:
                    self.step()
            except Exception as error:  # a fault of ours: those that run are answered, the others go on
                logger.exception("a step of the engine failed")
                self._fail(self.scheduler.running_ids or list(self._pending), error)
            self._observe()

    def _observe(self) -> None:
        try:
            self.after_step(self)
        except Exception:
            logger.exception("the state of the engine could not be published")

    def _wait_for_work(self) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: self._stopping or self._pending)
            return not self._stopping

    def _add(self, request: OmniDiffusionRequest, reply: Reply) -> None:
        if self._stopping:
            raise EngineStoppedError("the model is being unloaded")
        key = self.runner.adapter.key(request)
        try:
            self.scheduler.add_request(request.request_id, key, request.priority or 0)
        except QueueFullError:
            # Requests whose clients are gone must not keep others out.
            self._sweep()
            self.scheduler.add_request(request.request_id, key, request.priority or 0)
        self._pending[request.request_id] = PendingRequest(request, reply, key)

    def _schedule(self) -> Wave[SamplingParamsKey] | None:
        with self._changed:
            self._sweep()
            wave = self.scheduler.schedule()
            # Those that were let in just now may be cancelled already, and must not be encoded.
            while wave is not None and self._drop_stopped(wave.request_ids):
                wave = self.scheduler.schedule()
            if wave is not None:
                self._start(wave)
            return wave

    def _start(self, wave: Wave[SamplingParamsKey]) -> None:
        for request_id in wave.request_ids:
            pending = self._pending[request_id]
            if pending.started is None:
                pending.start(wave)
                self._wave_log.began(pending)

    def _sweep(self) -> None:
        """Now and then, answer the waiting requests that were cancelled or are too late."""
        began = time.monotonic()
        if began >= self._next_sweep:
            self._drop_stopped(self.scheduler.waiting_ids)
            ended = time.monotonic()
            self._next_sweep = ended + max(SWEEP_SECONDS, 10 * (ended - began))  # never more than a tenth of the time

    def _drop_stopped(self, request_ids: Iterable[str]) -> list[str]:
        """Let out, and return, the requests that nobody waits for any more."""
        dropped = []
        for request_id in request_ids:
            try:
                self._pending[request_id].request.raise_if_stopped()
            except Exception as error:
                self._fail([request_id], error)
                dropped.append(request_id)
        return dropped

    def _note_step(self, wave: Wave[SamplingParamsKey], outputs: BatchRunnerOutput) -> None:
        self.num_steps += 1
        for request_id in outputs.stepped:
            self._pending[request_id].took_step(wave, len(outputs.stepped), outputs.rows)
        with self._changed:
            # A request that only has to be decoded makes room for another one.
            self.scheduler.finish_requests(outputs.denoised)

    def _answer(self, request_id: str, output: DiffusionOutput) -> None:
        if output.error is not None:
            self._fail([request_id], output.error)
            return
        pending = self._pending[request_id]
        receipt = pending.receipt(output)
        self._release(request_id)
        self._wave_log.ended(pending, completed=True)
        self._unsent.acquire()
        self._responder.submit(self._send, pending.reply, output, receipt)

    def _send(self, reply: Reply, output: DiffusionOutput, receipt: Receipt) -> None:
        try:
            reply.succeed(output, receipt)
        finally:
            self._unsent.release()

    def _fail(self, request_ids: Iterable[str], error: Exception) -> None:
        for request_id in list(request_ids):
            pending = self._release(request_id)
            self._wave_log.ended(pending, completed=False)
            self._responder.submit(pending.reply.fail, as_error(error))

    def _release(self, request_id: str) -> PendingRequest:
        with self._changed:
            self.scheduler.finish_requests([request_id])
            self.runner.release([request_id])
            return self._pending.pop(request_id)
