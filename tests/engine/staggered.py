"""Requests that come one after the other while others run, and how far two results are apart."""

from __future__ import annotations

from typing import Any

import torch

from tests.engine.fakes import RecordedReply
from triton_diffusion.request import OmniDiffusionRequest
from triton_diffusion.serving import build_engine

ARRIVALS = (0, 2, 3, 3, 6, 6, 7, 9)
"""The step before which each request comes."""

TOGETHER = (0,) * 8
"""All before the first step: in request-level mode, one wave."""


def run_staggered(
    adapter: Any, requests: list[OmniDiffusionRequest], arrivals: tuple[int, ...] = ARRIVALS
) -> dict[str, RecordedReply]:
    """The replies by request id, of an engine that is stepped by hand."""
    engine = build_engine(adapter, adapter.config)
    replies = {request.request_id: RecordedReply() for request in requests}
    coming = list(zip(arrivals, requests, strict=False))
    step = 0
    while coming or engine.progress():
        while coming and coming[0][0] <= step:
            request = coming.pop(0)[1]
            engine.add_requests([(request, replies[request.request_id])])
        engine.step()
        step += 1
    engine.shutdown()
    assert engine.runner.num_live_states == 0
    return replies


def difference(one: torch.Tensor, other: torch.Tensor) -> float:
    """The largest difference, in units of the spread of `other` where that is above 1."""
    scale = max(1.0, float(other.float().std()))
    return float((one.float() - other.float()).abs().max()) / scale
