"""A request on its way through the engine."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from triton_diffusion.output import DiffusionOutput
from triton_diffusion.receipt import Receipt
from triton_diffusion.reply import Reply
from triton_diffusion.request import OmniDiffusionRequest
from triton_diffusion.sampling_params_key import SamplingParamsKey
from triton_diffusion.scheduling import Wave
from triton_diffusion.timeline import Timeline


@dataclass(eq=False)
class PendingRequest:
    """A request that waits or runs, where its answer goes, and what has happened to it so far.

    Args:
        joined_at_wave: the wave that it began in; 0 while it waits.
        is_denoised: it took all its steps.
        steps_left: denoising steps that it ended without; known when it has ended.
        answered: `time.monotonic()` when its answer was sent.
    """

    request: OmniDiffusionRequest
    reply: Reply
    key: SamplingParamsKey
    joined_at_wave: int = 0
    wave_id: int = 0
    wave_size: int = 0
    rows_per_step: list[int] = field(default_factory=list)
    is_denoised: bool = False
    steps_left: int = 0
    answered: float = 0.0

    @property
    def has_started(self) -> bool:
        return self.joined_at_wave > 0

    @property
    def timeline(self) -> Timeline:
        """Its stages up to now."""
        return self.request.timeline

    @property
    def seconds(self) -> float:
        """From arrival in the engine to the answer."""
        return self.answered - self.request.arrival_time

    def start(self, wave: Wave[SamplingParamsKey]) -> None:
        """Note that the request begins to run."""
        self.joined_at_wave = wave.wave_id
        self.stop_waiting()

    def stop_waiting(self) -> None:
        """Note that the request waits no more, whether it runs or leaves."""
        self.timeline.add("waiting", time.monotonic() - self.request.arrival_time)

    def took_step(self, wave: Wave[SamplingParamsKey], requests: int, rows: int) -> None:
        """Note a step that the request took together with others, itself included in both numbers."""
        self.wave_id = wave.wave_id
        self.wave_size = max(self.wave_size, requests)
        self.rows_per_step.append(rows)

    def durations(self, output: DiffusionOutput | None) -> dict[str, float]:
        """The seconds spent in each stage, those that a class's own `forward` reports included."""
        return {**self.timeline.durations, **(output.stage_durations if output is not None else {})}

    def receipt(self, output: DiffusionOutput) -> Receipt:
        """The receipt that goes with `output`."""
        milliseconds = {stage: round(seconds * 1000, 3) for stage, seconds in self.durations(output).items()}
        return Receipt(
            request_id=self.request.request_id,
            wave_id=self.wave_id,
            joined_at_wave=self.joined_at_wave,
            wave_size=self.wave_size,
            rows=max(self.rows_per_step, default=0),
            rows_per_step=self.rows_per_step,
            steps=output.num_inference_steps,
            key=str(self.key),
            sampling_params=self.request.sampling_params,
            queue_ms=milliseconds["waiting"],
            encode_ms=milliseconds.get("encode", 0.0),
            denoise_ms=milliseconds.get("denoise", 0.0),
            decode_ms=milliseconds.get("decode", 0.0),
        )
