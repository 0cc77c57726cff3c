"""From Triton's tensors and parameters to a request."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest

from triton_diffusion.errors import (
    DeadlineExceededError,
    FieldTypeError,
    FieldValueError,
    InvalidRequestError,
    RequestCancelledError,
    UnknownFieldError,
)
from triton_diffusion.request import OmniDiffusionRequest, parse_request, unique_request_id
from triton_diffusion.sampling_params import SamplingParams

TAKEN = frozenset({"prompt", "negative_prompt", "seed", "height", "width", "num_inference_steps", "guidance_scale"})
DEFAULTS = SamplingParams(height=64, width=64, num_inference_steps=20, guidance_scale=4.0)


def parse(
    tensors: dict[str, Any], parameters: dict[str, object] | None = None, **options: Any
) -> OmniDiffusionRequest:
    return parse_request(
        tensors,
        parameters or {},
        request_id="r",
        pipeline="SomePipeline",
        taken=TAKEN,
        defaults=DEFAULTS,
        random_seed=lambda: 1234,
        **options,
    )


PROMPT = {"prompt": np.array([[b"a cat"]], object)}


def test_a_tensor_counts_before_a_parameter_and_that_before_the_default() -> None:
    request = parse({**PROMPT, "height": np.array([[128]], np.int32)}, {"height": 256, "width": 96})
    params = request.sampling_params
    assert (request.prompt, params.height, params.width, params.num_inference_steps) == ("a cat", 128, 96, 20)


def test_a_request_without_a_seed_gets_a_random_one_that_is_known() -> None:
    assert parse(PROMPT).sampling_params.seed == 1234
    assert parse(PROMPT, {"seed": 0}).sampling_params.seed == 0


def test_everything_may_be_a_parameter() -> None:
    request = parse({}, {"prompt": "a cat", "negative_prompt": "a dog", "seed": 7})
    assert (request.prompt, request.negative_prompt, request.sampling_params.seed) == ("a cat", "a dog", 7)


def test_a_misspelt_name_is_refused_with_the_nearest_right_one() -> None:
    with pytest.raises(UnknownFieldError, match="unknown field 'hieght', did you mean 'height'"):
        parse(PROMPT, {"hieght": 64})


def test_an_unknown_name_is_refused_with_all_right_ones() -> None:
    with pytest.raises(UnknownFieldError, match="unknown field 'zzz'; known are: guidance_scale, height, .*width"):
        parse(PROMPT, {"zzz": 1})


def test_a_field_of_other_pipelines_is_refused() -> None:
    with pytest.raises(FieldValueError, match="strength is not taken by SomePipeline; it takes: guidance_scale"):
        parse(PROMPT, {"strength": 0.5})


def test_a_missing_prompt_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="prompt is missing"):
        parse({}, {"seed": 1})


def test_a_request_holds_one_prompt() -> None:
    with pytest.raises(FieldTypeError, match="exactly one string"):
        OmniDiffusionRequest(prompt=["a", "b"], request_id="r")  # type: ignore[arg-type]


def test_ids_are_unique_even_if_the_clients_are_not() -> None:
    ids = [unique_request_id("mine") for _ in range(3)] + [unique_request_id()]
    assert len(set(ids)) == 4
    assert ids[0].startswith("mine-")


def test_a_cancelled_request_stops() -> None:
    with pytest.raises(RequestCancelledError):
        parse(PROMPT, is_cancelled=lambda: True).raise_if_stopped()


def test_a_request_stops_at_its_deadline() -> None:
    parse(PROMPT, timeout=600.0).raise_if_stopped()
    request = parse(PROMPT, timeout=0.01)
    time.sleep(0.02)
    with pytest.raises(DeadlineExceededError, match=r"timeout of 0\.010 s"):
        request.raise_if_stopped()
