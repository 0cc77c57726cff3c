"""Stacks the tensors of several requests into one, and gives each request its own part back."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from triton_diffusion.errors import CollateError


def collate(name: str, tensors: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
    """The rows of all requests in one tensor.

    Args:
        name: of what is stacked, for the error.
        tensors: one for each request, [rows of the request, ...]; either all are present or none.

    Returns:
        [all rows, ...], or None when every request has None.

    Raises:
        CollateError: some are None, or shapes (without the rows) or dtypes differ.
    """
    present = [tensor for tensor in tensors if tensor is not None]
    if not present:
        return None
    if len(present) != len(tensors):
        missing = [position for position, tensor in enumerate(tensors) if tensor is None]
        raise CollateError(f"{name}: all requests of a batch must have one, or none; missing at {missing}")
    first = present[0]
    for position, tensor in enumerate(present):
        if tensor.shape[1:] != first.shape[1:] or tensor.dtype != first.dtype:
            raise CollateError(
                f"{name}: request {position} has rows of shape {list(tensor.shape[1:])} and {tensor.dtype}, "
                f"request 0 of shape {list(first.shape[1:])} and {first.dtype}; they must be equal"
            )
    return torch.cat(present)


def split(tensor: torch.Tensor, rows: Sequence[int]) -> list[torch.Tensor]:
    """Each request's own rows of a batched tensor.

    Every part is a copy: a view would keep the whole batch's memory alive for as long as one request is.

    Args:
        tensor: [all rows, ...].
        rows: the number of rows of each request; must add up to all rows.

    Raises:
        CollateError: they do not add up.
    """
    if sum(rows) != tensor.shape[0]:
        raise CollateError(f"{tensor.shape[0]} rows cannot be split into {list(rows)}")
    return [part.clone() for part in torch.split(tensor, list(rows))]
