"""What happened to a request, for the one who sent it."""

from __future__ import annotations

import dataclasses
import json

from triton_diffusion.sampling_params import SamplingParams


@dataclasses.dataclass(frozen=True, kw_only=True)
class Receipt:
    """One request's way through the engine.

    Args:
        request_id: the client's own id with a number behind it.
        wave_id: the wave that the request ended in; waves of a model instance are counted.
        joined_at_wave: the wave that it began in; in request-level mode the same one.
        wave_size: the most requests that it took a step together with, itself included.
        rows: the most images that took a step together with its own, these included.
        rows_per_step: the same for each of its steps.
        steps: denoising steps that were run.
        key: what the requests of a wave have in common.
        sampling_params: with the defaults filled in.
        queue_ms: from arrival in the engine to the first step (Triton's own wait is before it).
        encode_ms, denoise_ms, decode_ms: of this request; a step shared with others counts in full for each.
    """

    request_id: str
    wave_id: int
    joined_at_wave: int
    wave_size: int
    rows: int
    rows_per_step: list[int]
    steps: int
    key: str
    sampling_params: SamplingParams
    queue_ms: float
    encode_ms: float
    denoise_ms: float
    decode_ms: float

    def to_json(self) -> str:
        values = {attribute.name: getattr(self, attribute.name) for attribute in dataclasses.fields(self)}
        return json.dumps({**values, "sampling_params": self.sampling_params.given()})

    @classmethod
    def from_json(cls, text: str | bytes) -> Receipt:
        values = json.loads(text)
        return cls(**{**values, "sampling_params": SamplingParams(**values["sampling_params"])})
