"""The memory that a model instance has taken."""

from __future__ import annotations

import resource

import torch


def peak_bytes() -> int:
    """The most bytes that tensors have taken on this process's GPUs; without one, its largest resident set."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return sum(torch.cuda.max_memory_allocated(device) for device in range(torch.cuda.device_count()))
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
