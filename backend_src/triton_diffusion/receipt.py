"""What happened to a request, for the one who sent it."""

from __future__ import annotations

import dataclasses
import json

from triton_diffusion.output import DiffusionOutput
from triton_diffusion.sampling_params import SamplingParams


@dataclasses.dataclass(frozen=True, kw_only=True)
class Receipt:
    """One request's way through the engine.

    Args:
        request_id: the client's own id with a number behind it.
        wave_id: counts the waves of this model instance.
        wave_size: requests that started together.
        rows: the most images that shared a forward pass in the wave.
        key: what the requests of the wave have in common.
        sampling_params: with the defaults filled in.
        num_inference_steps: steps that were run.
        queue_ms: from arrival in the engine to the start of the wave (Triton's own wait is before it).
        encode_ms, denoise_ms, decode_ms: of this request; a step shared with others counts in full for each.
    """

    request_id: str
    wave_id: int
    wave_size: int
    rows: int
    key: str
    sampling_params: SamplingParams
    num_inference_steps: int
    queue_ms: float
    encode_ms: float
    denoise_ms: float
    decode_ms: float

    @classmethod
    def of(
        cls,
        request_id: str,
        *,
        wave_id: int,
        wave_size: int,
        rows: int,
        key: str,
        sampling_params: SamplingParams,
        output: DiffusionOutput,
        queue_seconds: float,
    ) -> Receipt:
        durations = output.stage_durations
        return cls(
            request_id=request_id,
            wave_id=wave_id,
            wave_size=wave_size,
            rows=rows,
            key=key,
            sampling_params=sampling_params,
            num_inference_steps=output.num_inference_steps,
            queue_ms=round(queue_seconds * 1000, 3),
            encode_ms=round(durations.get("encode", 0.0) * 1000, 3),
            denoise_ms=round(durations.get("denoise", 0.0) * 1000, 3),
            decode_ms=round(durations.get("decode", 0.0) * 1000, 3),
        )

    def to_json(self) -> str:
        values = {attribute.name: getattr(self, attribute.name) for attribute in dataclasses.fields(self)}
        return json.dumps({**values, "sampling_params": self.sampling_params.given()})

    @classmethod
    def from_json(cls, text: str | bytes) -> Receipt:
        values = json.loads(text)
        return cls(**{**values, "sampling_params": SamplingParams(**values["sampling_params"])})
