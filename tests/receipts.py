"""A receipt for tests that need one."""

from __future__ import annotations

from typing import Any

from triton_diffusion.receipt import Receipt
from triton_diffusion.sampling_params import SamplingParams


def receipt_of(**sampling_params: Any) -> Receipt:
    """The receipt of some request with these sampling parameters."""
    return Receipt(
        request_id="r-1",
        wave_id=3,
        joined_at_wave=3,
        wave_size=8,
        rows=9,
        rows_per_step=[9, 9],
        steps=2,
        key="height=64",
        sampling_params=SamplingParams(**sampling_params),
        queue_ms=12.5,
        encode_ms=1.0,
        denoise_ms=500.0,
        decode_ms=0.0,
    )
