"""Sampling parameters: defaults, seeds of rows, and the key."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.receipts import receipt_of
from triton_diffusion.errors import UnknownFieldError
from triton_diffusion.receipt import Receipt
from triton_diffusion.sampling_params import SAMPLING_FIELDS, SEEDS, SamplingParams
from triton_diffusion.sampling_params_key import STRICT_FIELDS, SamplingParamsKey


def test_image_i_of_a_request_uses_seed_plus_i() -> None:
    assert SamplingParams(seed=7, num_images_per_prompt=3).row_seeds() == [7, 8, 9]


def test_seeds_start_again_after_the_last() -> None:
    assert SamplingParams(seed=SEEDS - 1, num_images_per_prompt=2).row_seeds() == [SEEDS - 1, 0]


def test_without_a_seed_there_are_no_row_seeds() -> None:
    with pytest.raises(ValueError, match="no seed"):
        SamplingParams().row_seeds()


def test_given_values_win_over_defaults_even_if_they_are_zero() -> None:
    params = SamplingParams(seed=0, height=32).with_defaults(SamplingParams(seed=5, height=64, width=64))
    assert params.given() == {"seed": 0, "height": 32, "width": 64}


def test_parsing_names_the_misspelt_parameter() -> None:
    with pytest.raises(UnknownFieldError, match="unknown sampling parameter 'stepz'"):
        SamplingParams.parse({"stepz": 3})


def test_every_parameter_is_in_the_table() -> None:
    assert set(SAMPLING_FIELDS) == set(SamplingParams.__dataclass_fields__)


params = st.builds(
    SamplingParams,
    height=st.none() | st.integers(1, 4096),
    width=st.none() | st.integers(1, 4096),
    guidance_scale=st.none() | st.floats(0, 100),
    num_inference_steps=st.none() | st.integers(1, 1000),
)


@given(params, params)
def test_equal_keys_have_equal_shapes_and_shapes_fit_triton(one: SamplingParams, other: SamplingParams) -> None:
    keys = SamplingParamsKey.of(one), SamplingParamsKey.of(other)
    shapes = [key.batch_key_shape() for key in keys]
    assert (keys[0] == keys[1]) == (shapes[0] == shapes[1])  # 62 bits: no collision will be seen here
    for zero, *halves in shapes:
        assert zero == 0
        assert all(0 < half < 2**31 for half in halves)


def test_a_key_has_no_elements_whatever_it_hashes() -> None:
    shape = SamplingParamsKey.of(SamplingParams(height=1024, width=1024)).batch_key_shape()
    assert np.empty(shape, np.uint8).nbytes == 0


def test_the_shape_of_a_key_is_the_same_in_every_process() -> None:
    # Clients of other versions, and of other languages, must meet in the same batch. The numbers come from
    # printf '[["height", 64], ["width", 64], ["num_frames", null], ["max_sequence_length", 16]]' | b2sum -l 64
    key = SamplingParamsKey((("height", 64), ("width", 64), ("num_frames", None), ("max_sequence_length", 16)))
    assert key.batch_key_shape() == (0, 1472731784, 357072578)


def test_the_strict_key_keeps_apart_what_vllm_omni_does() -> None:
    assert {"height", "width", "num_inference_steps", "guidance_scale", "num_images_per_prompt"} <= set(STRICT_FIELDS)
    assert not {"seed", "output_format"} & set(STRICT_FIELDS)


def test_a_receipt_survives_json() -> None:
    receipt = receipt_of(seed=2**63 - 1, guidance_scale=7.3)
    assert Receipt.from_json(receipt.to_json()) == receipt
