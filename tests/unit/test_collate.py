"""Tensors of several requests in one, and back."""

from __future__ import annotations

import pytest
import torch

from triton_diffusion.collate import collate, split
from triton_diffusion.errors import CollateError


def test_rows_of_all_requests_are_stacked_in_order() -> None:
    stacked = collate("latents", [torch.zeros(1, 4), torch.ones(2, 4)])
    assert stacked is not None
    assert stacked[:, 0].tolist() == [0, 1, 1]


def test_what_no_request_has_stays_absent() -> None:
    assert collate("image", [None, None]) is None


def test_all_or_none() -> None:
    with pytest.raises(CollateError, match=r"image: all requests .* or none; missing at \[1\]"):
        collate("image", [torch.zeros(1, 4), None])


@pytest.mark.parametrize("other", [torch.zeros(1, 5), torch.zeros(1, 4, dtype=torch.float16), torch.zeros(1, 4, 1)])
def test_shapes_and_dtypes_must_be_equal(other: torch.Tensor) -> None:
    with pytest.raises(CollateError, match="latents: request 1 has rows of shape"):
        collate("latents", [torch.zeros(1, 4), other])


def test_splitting_undoes_collating() -> None:
    parts = [torch.randn(rows, 3) for rows in (1, 3, 2)]
    stacked = collate("latents", parts)
    assert stacked is not None
    for part, again in zip(parts, split(stacked, [1, 3, 2]), strict=True):
        assert torch.equal(part, again)


def test_a_part_does_not_keep_the_batch_alive() -> None:
    part = split(torch.zeros(100, 1000), [1, 99])[0]
    assert part.untyped_storage().nbytes() == 1000 * 4


def test_rows_must_add_up() -> None:
    with pytest.raises(CollateError, match=r"5 rows cannot be split into \[2, 2\]"):
        split(torch.zeros(5, 1), [2, 2])
