"""A class of one's own whose forward pass takes so much memory for each request that only a few of them fit."""

from __future__ import annotations

import resource
from collections.abc import Sequence
from typing import Any

import psutil
import torch

from triton_diffusion.adapters import RequestState, StableDiffusion3Adapter
from triton_diffusion.config import EngineConfig

REQUEST_BYTES = 200 * 2**20
ROOM_BYTES = 5 * REQUEST_BYTES + REQUEST_BYTES // 2


class Hungry(StableDiffusion3Adapter):
    """There is room for five such requests in this process, and really no more."""

    def __init__(self, pipeline: Any, config: EngineConfig) -> None:
        super().__init__(pipeline, config)
        limit = psutil.Process().memory_info().vms + ROOM_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))

    def denoise_step(self, states: Sequence[RequestState]) -> list[torch.Tensor]:
        scratch = [torch.empty(REQUEST_BYTES, dtype=torch.uint8) for _ in states]
        predictions = super().denoise_step(states)
        del scratch
        return predictions
