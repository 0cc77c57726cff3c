"""A pipeline without an adapter runs through its stock call."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

from tests.tiny_pipelines import flux, pixart_alpha
from triton_diffusion.adapters import StockAdapter
from triton_diffusion.adapters.loading import adapter_for
from triton_diffusion.batch import DiffusionRequestBatch
from triton_diffusion.config import EngineConfig
from triton_diffusion.errors import (
    ConfigurationError,
    FieldValueError,
    InvalidRequestError,
    NonFiniteError,
    RequestCancelledError,
)
from triton_diffusion.request import OmniDiffusionRequest
from triton_diffusion.sampling_params import SamplingParams

CONFIG = EngineConfig(max_num_seqs=8, model="tiny")


def request_of(adapter: Any, **given: Any) -> OmniDiffusionRequest:
    params = SamplingParams(seed=3, num_inference_steps=3, **given).with_defaults(adapter.defaults)
    return OmniDiffusionRequest(prompt="a cat", request_id="r", sampling_params=params)


@pytest.fixture(scope="module")
def adapter() -> Any:
    return StockAdapter(flux(), CONFIG)  # a pipeline with all that the stock call may have, as if it had no adapter


def test_it_is_found_and_says_that_nothing_is_fused(caplog: pytest.LogCaptureFixture) -> None:
    adapter = adapter_for(pixart_alpha(), CONFIG)
    assert isinstance(adapter, StockAdapter)
    assert not adapter.supports_request_batch
    assert "PixArtAlphaPipeline has no adapter: its requests run one at a time" in caplog.text


def test_image_i_is_what_the_stock_call_makes_of_seed_plus_i(adapter: Any) -> None:
    request = request_of(adapter, height=32, width=32, num_images_per_prompt=2)
    output = adapter.forward(DiffusionRequestBatch([request]))[0].output
    for row, seed in enumerate((3, 4)):
        alone = adapter.pipeline(
            "a cat",
            height=32,
            width=32,
            num_inference_steps=3,
            guidance_scale=adapter.defaults.guidance_scale,
            max_sequence_length=adapter.defaults.max_sequence_length,
            generator=torch.Generator().manual_seed(seed),
        ).images[0]
        assert np.array_equal(output[row], np.asarray(alone))


def test_what_the_pipeline_takes_is_read_from_its_call(adapter: Any) -> None:
    assert {"prompt", "seed", "true_cfg_scale", "negative_prompt"} <= adapter.taken
    assert not {"strength", "image", "num_frames"} & adapter.taken


def test_a_default_that_the_pipeline_does_not_take_is_refused_at_load(adapter: Any) -> None:
    config = dataclasses.replace(CONFIG, default_sampling_params=SamplingParams(strength=0.5))
    with pytest.raises(ConfigurationError, match="strength is not taken by FluxPipeline"):
        StockAdapter(adapter.pipeline, config)


def test_a_cancelled_request_stops_between_two_steps(adapter: Any) -> None:
    asked = []

    def is_cancelled() -> bool:
        asked.append(True)
        return len(asked) > 2

    request = dataclasses.replace(request_of(adapter, height=32, width=32), is_cancelled=is_cancelled)
    with pytest.raises(RequestCancelledError):
        adapter.forward(DiffusionRequestBatch([request]))
    assert len(asked) == 3, "once before the call, and after each of two steps"


def test_a_size_that_the_pipeline_rounds_is_refused(adapter: Any) -> None:
    request = request_of(adapter, height=34, width=32)
    with pytest.raises(FieldValueError, match="height=34: FluxPipeline makes 32 of it; ask for a size that it makes"):
        adapter.forward(DiffusionRequestBatch([request]))


def test_a_picture_of_nan_is_an_error_and_not_black(adapter: Any) -> None:
    request = request_of(adapter, height=32, width=32)
    with pytest.raises(NonFiniteError, match="not finite"):
        StockAdapter._pixels(adapter, {"images": np.full([1, 32, 32, 3], np.nan, np.float32)}, request.sampling_params)


def test_one_side_alone_is_bounded_too(adapter: Any) -> None:
    with pytest.raises(FieldValueError, match="height=16384 width=None: too many pixels"):
        adapter.check_request(request_of(adapter, height=16384))


def test_what_the_pipelines_own_check_refuses_is_the_clients_error(adapter: Any) -> None:
    request = request_of(adapter, height=32, width=32, max_sequence_length=1000)
    with pytest.raises(InvalidRequestError, match="FluxPipeline: `max_sequence_length` cannot be greater than 512"):
        adapter.forward(DiffusionRequestBatch([request]))
