"""Rows: one image (or video) of one request each; how they are drawn, stacked, cut and padded."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, TypeVar

import torch

from triton_diffusion.adapters.request_state import Conditioning, Evaluation
from triton_diffusion.collate import collate
from triton_diffusion.request import OmniDiffusionRequest

Group = TypeVar("Group", bound=Hashable)


def row_generators(request: OmniDiffusionRequest) -> list[torch.Generator]:
    """A new CPU generator for each row, so that the noise is the same on every device and on every try."""
    return [torch.Generator().manual_seed(seed) for seed in request.sampling_params.row_seeds()]


def repeated(tensor: torch.Tensor, rows: int) -> torch.Tensor:
    """A tensor of one row for every row of a request."""
    return tensor.expand(rows, *tensor.shape[1:])


def repeated_conditioning(conditioning: Conditioning, rows: int) -> Conditioning:
    """A conditioning of one row for every row of a request."""
    return {name: repeated(tensor, rows) for name, tensor in conditioning.items()}


def stacked_latents(evaluations: Sequence[Evaluation]) -> torch.Tensor:
    """The latents of all evaluations: [all rows, ...]."""
    return _stacked("latents", [evaluation.state.latents for evaluation in evaluations])


def stacked_timesteps(evaluations: Sequence[Evaluation]) -> torch.Tensor:
    """The timestep of each row: [all rows]."""
    return torch.cat([evaluation.state.timestep.expand(evaluation.state.num_rows) for evaluation in evaluations])


def stacked_conditioning(evaluations: Sequence[Evaluation]) -> dict[str, Any]:
    """The conditioning of all evaluations, each tensor [all rows, ...]."""
    return {
        name: _stacked(name, [evaluation.conditioning[name] for evaluation in evaluations])
        for name in evaluations[0].conditioning
    }


def _stacked(name: str, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    stacked = collate(name, tensors)
    assert stacked is not None
    return stacked


def _has_rows(value: Any, rows: int) -> bool:
    return isinstance(value, (torch.Tensor, list)) and len(value) == rows


def predicted_by_group(
    evaluations: Sequence[Evaluation],
    groups: Sequence[Group],
    predict: Callable[[Group, Sequence[Evaluation]], torch.Tensor],
) -> torch.Tensor:
    """The predictions of evaluations that cannot all share a forward pass, in their own order: [all rows, ...].

    Args:
        groups: of each evaluation; those of one group share a pass.
        predict: the predictions of one group's evaluations.
    """
    parts: dict[Group, Iterator[torch.Tensor]] = {}
    for group in dict.fromkeys(groups):
        together = [each for each, own in zip(evaluations, groups, strict=True) if own == group]
        rows = [each.state.num_rows for each in together]
        parts[group] = iter(torch.split(predict(group, together), rows))
    return torch.cat([next(parts[group]) for group in groups])


def cut_rows(value: Any, rows: int, start: int, end: int) -> Any:
    """The rows from `start` to `end` of a tensor or list of `rows` rows, or of each in a dict; None stays None."""
    if isinstance(value, dict):
        return {name: cut_rows(entry, rows, start, end) for name, entry in value.items()}
    return value[start:end] if _has_rows(value, rows) else value


def padded_rows(value: Any, rows: int, wanted: int) -> Any:
    """The same of any such value, with its first row repeated at the end until there are `wanted` rows."""
    if isinstance(value, dict):
        return {name: padded_rows(entry, rows, wanted) for name, entry in value.items()}
    if not _has_rows(value, rows):
        return value
    if isinstance(value, list):
        return value + value[:1] * (wanted - rows)
    return torch.cat([value, value[:1].expand(wanted - rows, *value.shape[1:])])
