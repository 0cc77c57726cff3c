"""diffusers' schedulers, one for each request."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


def own_scheduler(scheduler: Any, device: torch.device, **arguments: Any) -> Any:
    """A request's own copy of a diffusers scheduler: its steps and history are nobody else's.

    Args:
        arguments: of `set_timesteps`, besides the device.
    """
    own = copy.deepcopy(scheduler)
    own.set_timesteps(device=device, **arguments)
    if hasattr(own, "set_begin_index"):
        own.set_begin_index(0)
    return own


@contextmanager
def using_scheduler(pipeline: Any, scheduler: Any) -> Iterator[None]:
    """Lets methods of the pipeline that read `self.scheduler` work on a request's own one."""
    stock, pipeline.scheduler = pipeline.scheduler, scheduler
    try:
        yield
    finally:
        pipeline.scheduler = stock


def dynamic_shift(scheduler: Any, image_tokens: int, max_shift: float) -> dict[str, float]:
    """The shift of the timesteps by the number of a request's own image tokens, as an argument of `set_timesteps`.

    Args:
        max_shift: where the scheduler's config has none.
    """
    config = scheduler.config
    if not config.get("use_dynamic_shifting"):
        return {}
    first, last = config.get("base_image_seq_len", 256), config.get("max_image_seq_len", 4096)
    low, high = config.get("base_shift", 0.5), config.get("max_shift", max_shift)
    slope = (high - low) / (last - first)
    return {"mu": image_tokens * slope + (low - slope * first)}


def takes_argument(function: Any, name: str) -> bool:
    """Whether `function` has an argument of that name."""
    return name in inspect.signature(function).parameters
