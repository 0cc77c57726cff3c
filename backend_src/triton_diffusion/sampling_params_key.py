"""What must be equal for two requests to share a forward pass."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass

from triton_diffusion.field import Value
from triton_diffusion.sampling_params import SAMPLING_FIELDS, SamplingParams, describe

HALF = 2**31 - 1
"""Triton's dimensions are positive signed numbers, so each half of the hash has 31 bits."""

SHAPE_FIELDS = ("height", "width", "num_frames", "max_sequence_length")
"""Fields that no adapter varies inside one forward pass; a client knows no more than that."""

STRICT_FIELDS = tuple(name for name, declared in SAMPLING_FIELDS.items() if declared.in_strict_key)
"""vLLM-Omni's rule: every shape- and guidance-sensitive field, the steps and the number of outputs."""


@dataclass(frozen=True)
class SamplingParamsKey:
    """The sampling parameters that a fused forward pass cannot vary per row. Hashable, and equal by value."""

    items: tuple[tuple[str, Value | None], ...]

    @classmethod
    def of(cls, sampling_params: SamplingParams, fields: Iterable[str] = SHAPE_FIELDS) -> SamplingParamsKey:
        """The key of `sampling_params` over the named fields."""
        return cls(tuple((name, getattr(sampling_params, name)) for name in fields))

    def extended(self, **items: Value | None) -> SamplingParamsKey:
        """The key with further items, where they are not None."""
        return SamplingParamsKey((*self.items, *((name, value) for name, value in items.items() if value is not None)))

    def batch_key_shape(self) -> tuple[int, int, int]:
        """The shape of the `batch_key` input: zero elements, and a stable hash in its dimensions.

        Triton's dynamic batcher puts requests with equal input shapes into one batch, so requests of equal keys
        meet there at the cost of no bytes. Keys may collide; the engine compares the keys themselves.
        """
        digest = hashlib.blake2b(json.dumps(self.items).encode(), digest_size=8).digest()
        halves = (int.from_bytes(digest[:4], "big"), int.from_bytes(digest[4:], "big"))
        return (0, halves[0] % HALF + 1, halves[1] % HALF + 1)

    def __str__(self) -> str:
        return describe({name: value for name, value in self.items if value is not None})
