"""Families of pipelines that have no adapter are served as they are: Sana, LTX-Video, AuraFlow, PixArt."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from tests.tiny_other_pipelines import aura_flow, ltx, sana
from tests.tiny_pipelines import pixart_alpha
from triton_diffusion.adapters import StockAdapter
from triton_diffusion.adapters.loading import adapter_for
from triton_diffusion.batch import DiffusionRequestBatch
from triton_diffusion.config import EngineConfig
from triton_diffusion.errors import ExecutionError, InvalidRequestError, RequestCancelledError
from triton_diffusion.model_runner import ModelRunner
from triton_diffusion.output import DiffusionOutput
from triton_diffusion.request import parse_request

CONFIG = EngineConfig(max_num_seqs=8, model="tiny")
STEPS = 2


class Family(NamedTuple):
    """A tiny pipeline, the size to ask it for, and a request that is wrong for it."""

    build: Callable[[], Any]
    size: dict[str, int]
    wrong: dict[str, float]
    message: str


FAMILIES = {
    "Sana": Family(sana, {"height": 64, "width": 96}, {"num_frames": 5}, "num_frames is not taken by SanaPipeline"),
    "LTX": Family(
        ltx,
        {"height": 32, "width": 64, "num_frames": 5},
        {"height": 40},
        "LTXPipeline: `height` and `width` have to be divisible by 32 but are 40 and 64",
    ),
    "AuraFlow": Family(
        aura_flow,
        {"height": 32, "width": 48},
        {"width": 34},
        "AuraFlowPipeline: `height` and `width` have to be divisible by 4 but are 32 and 34",
    ),
    "PixArt": Family(
        pixart_alpha, {"height": 64, "width": 96}, {"strength": 0.5}, "strength is not taken by PixArtAlphaPipeline"
    ),
}


class Served(NamedTuple):
    """A family, and the adapter of its pipeline."""

    family: Family
    adapter: StockAdapter

    def generate(self, *, is_cancelled: Callable[[], bool] = lambda: False, **parameters: object) -> DiffusionOutput:
        """What a client gets for these request parameters beside the usual ones."""
        request = parse_request(
            {},
            {"prompt": "a cat", "seed": 3, "num_inference_steps": STEPS, **self.family.size, **parameters},
            request_id="r",
            pipeline=self.adapter.name,
            taken=self.adapter.taken,
            defaults=self.adapter.defaults,
            random_seed=lambda: 0,
            is_cancelled=is_cancelled,
        )
        self.adapter.check_request(request)
        return ModelRunner(self.adapter).execute(DiffusionRequestBatch([request]))["r"]

    def pixels(self, **parameters: object) -> np.ndarray[Any, Any]:
        """The pixels of what a client gets."""
        output = self.generate(**parameters)  # type: ignore[arg-type]
        if output.error is not None:
            raise output.error
        assert output.output is not None
        return output.output

    def stock(self, seed: int) -> np.ndarray[Any, Any]:
        """The picture or video of the stock call, as diffusers itself makes it bytes."""
        generator = torch.Generator().manual_seed(seed)
        result = self.adapter.pipeline("a cat", num_inference_steps=STEPS, generator=generator, **self.family.size)
        return np.asarray(result.frames[0] if "frames" in result else result.images[0])


@pytest.fixture(scope="module", params=FAMILIES)
def served(request: pytest.FixtureRequest) -> Served:
    family = FAMILIES[request.param]
    adapter = adapter_for(family.build(), CONFIG)
    assert isinstance(adapter, StockAdapter)
    return Served(family, adapter)


@pytest.fixture(scope="module")
def stock(served: Served) -> np.ndarray[Any, Any]:
    """What the stock call makes of the usual request."""
    return served.stock(seed=3)


def test_image_i_is_what_the_stock_call_makes_of_seed_plus_i(served: Served, stock: np.ndarray[Any, Any]) -> None:
    output = served.generate(num_images_per_prompt=2)
    pixels = output.output
    assert pixels is not None, output.error
    size = served.family.size
    frames = [size["num_frames"]] if "num_frames" in size else []
    assert pixels.shape == (2, *frames, size["height"], size["width"], 3)
    assert pixels.dtype == np.uint8
    assert np.array_equal(pixels[0], stock)
    assert np.array_equal(pixels[1], served.stock(seed=4))
    assert not np.array_equal(*pixels)
    assert output.num_inference_steps == STEPS
    assert served.adapter.raw_output == ("videos" if frames else None)


def test_a_bad_argument_is_the_clients_error(served: Served) -> None:
    with pytest.raises(InvalidRequestError, match=served.family.message):
        served.pixels(**served.family.wrong)


def test_an_error_inside_the_pipeline_is_that_requests_alone(
    served: Served, stock: np.ndarray[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise ValueError("the transformer broke")

    with monkeypatch.context() as patch:
        patch.setattr(served.adapter.pipeline.transformer, "forward", broken)
        with pytest.raises(ExecutionError, match="ValueError: the transformer broke"):
            served.pixels()
    assert np.array_equal(served.pixels()[0], stock), "the next request is served as ever"


def test_a_cancelled_request_stops_between_two_steps(served: Served, stock: np.ndarray[Any, Any]) -> None:
    asked = []

    def is_cancelled() -> bool:
        asked.append(True)
        return len(asked) > 1

    assert isinstance(served.generate(is_cancelled=is_cancelled).error, RequestCancelledError)
    assert len(asked) == 2, "once before the call, and after the first step"
    assert np.array_equal(served.pixels()[0], stock), "the next request is served as ever"


def test_a_number_of_frames_that_the_pipeline_rounds_is_refused() -> None:
    served = Served(FAMILIES["LTX"], StockAdapter(ltx(), CONFIG))
    with pytest.raises(InvalidRequestError, match="num_frames=6: LTXPipeline makes 5 of it"):
        served.pixels(num_frames=6)


def test_the_defaults_are_those_of_the_call() -> None:
    defaults = {name: adapter_for(family.build(), CONFIG).defaults for name, family in FAMILIES.items()}
    assert (defaults["Sana"].height, defaults["Sana"].guidance_scale) == (1024, 4.5)
    assert (defaults["LTX"].width, defaults["LTX"].num_frames, defaults["LTX"].guidance_scale) == (704, 161, 3.0)
    assert (defaults["AuraFlow"].num_inference_steps, defaults["AuraFlow"].max_sequence_length) == (50, 256)
    assert defaults["PixArt"].height is None, "the call computes it"
