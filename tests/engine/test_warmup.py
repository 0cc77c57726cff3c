"""The warm-up runs full waves before the first request, says what does not fit, and leaves no trace."""

from __future__ import annotations

import dataclasses
import inspect
import logging
import threading
from typing import Any

import numpy as np
import pytest
import torch

from tests.engine.fakes import CountingAdapter
from tests.example_requests import mixed_requests, stock_call
from tests.families import BY_NAME
from tests.tiny_pipelines import pixart_alpha, stable_diffusion_3
from triton_diffusion.adapters import StockAdapter
from triton_diffusion.adapters.loading import adapter_for
from triton_diffusion.batch import DiffusionRequestBatch
from triton_diffusion.config import EngineConfig
from triton_diffusion.errors import ConfigurationError
from triton_diffusion.output import DiffusionOutput
from triton_diffusion.request import OmniDiffusionRequest
from triton_diffusion.sampling_params import SamplingParams
from triton_diffusion.serving import build_engine
from triton_diffusion.warmup import is_out_of_memory, warm_up


def config(**values: Any) -> EngineConfig:
    return EngineConfig(**{"model": "fake", "max_num_seqs": 8, **values})


def test_a_full_wave_runs_at_the_default_and_at_each_declared_shape(caplog: pytest.LogCaptureFixture) -> None:
    adapter = CountingAdapter()
    shapes = (SamplingParams(height=16), SamplingParams(), SamplingParams(height=16, num_inference_steps=3))
    with caplog.at_level(logging.INFO):
        warm_up(adapter, config(warmup_shapes=shapes))
    assert [len(wave) for wave in adapter.waves] == [8] * (2 + 2 + 3), "two steps each, or as many as the shape says"
    assert "warm-up: 3 waves of 8 requests in" in caplog.text
    assert "memory peak" in caplog.text


# The others warm up in tests/server/test_serve.py.
@pytest.mark.parametrize("name", ["QwenImageEdit", "Wan2.1", "StableDiffusionXL-DPMSolver"])
def test_a_family_warms_up_and_gives_the_same_bits_afterwards(name: str) -> None:
    family = BY_NAME[name]
    pipeline = family.build()
    taken = inspect.signature(type(pipeline).__call__).parameters
    given = {name: value for name, value in family.common.items() if name in taken}
    adapter = adapter_for(pipeline, config(max_num_seqs=2, default_sampling_params=SamplingParams(**given)))
    warm_up(adapter, adapter.config)
    (request,) = family.requests(adapter, 1, num_images_per_prompt=1)
    (output,) = adapter.forward(DiffusionRequestBatch([request]))
    fresh = adapter_for(family.build(), adapter.config)
    (expected,) = fresh.forward(DiffusionRequestBatch([dataclasses.replace(request)]))
    assert output.output is not None
    assert expected.output is not None
    assert np.array_equal(output.output, expected.output)


def test_nobody_finds_the_prompts_of_the_warm_up_in_the_cache() -> None:
    pipeline = stable_diffusion_3()
    adapter = adapter_for(pipeline, config(max_num_seqs=2))
    cache = pipeline.encode_prompt
    warm_up(adapter, adapter.config)
    assert pipeline.encode_prompt is cache
    assert cache._results == {}
    engine = build_engine(adapter, adapter.config)
    assert engine.runner.num_live_states == 0
    assert engine.progress() == {}


def test_a_pipeline_that_cannot_be_fused_runs_one_request(caplog: pytest.LogCaptureFixture) -> None:
    adapter = adapter_for(pixart_alpha(), config())
    with caplog.at_level(logging.INFO):
        warm_up(adapter, adapter.config)
    assert "warm-up: 1 wave of 1 requests" in caplog.text


def test_a_step_that_fails_is_named_with_its_shape_and_not_tried_in_halves() -> None:
    adapter = CountingAdapter()

    def fail() -> None:
        raise RuntimeError("the device is lost")

    adapter.before_step = fail
    with pytest.raises(ConfigurationError, match="a wave of 8 requests at height=8 failed: RuntimeError: the device"):
        warm_up(adapter, config())
    assert len(adapter.waves) <= 1


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        (SamplingParams(width=64), "at height=8 width=64 failed: width is not taken by CountingPipeline"),
        (SamplingParams(height=9000), "at height=9000 failed: height=9000 .*max_pixels"),
    ],
)
def test_a_shape_that_no_client_could_ask_for_is_refused(shape: SamplingParams, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        warm_up(CountingAdapter(), config(warmup_shapes=(shape,)))


def test_it_runs_on_the_thread_that_runs_the_requests_and_its_error_ends_it() -> None:
    engine = build_engine(CountingAdapter(), config())
    threads = []
    engine.start(lambda: threads.append(threading.current_thread().name))
    engine.shutdown()
    assert threads == ["diffusion-engine"]

    def fail() -> None:
        raise ConfigurationError("does not fit")

    failing = build_engine(CountingAdapter(), config())
    with pytest.raises(ConfigurationError, match="does not fit"):
        failing.start(fail)
    failing.shutdown()


@pytest.mark.parametrize("room", [1, 5])
def test_the_largest_wave_that_fits_every_shape_is_found(room: int) -> None:
    # Really without memory: tests/server/test_serve.py.
    adapter = CountingAdapter()
    denoise_step = adapter.denoise_step

    def with_little_memory(states: Any) -> Any:
        height = states[0].request.sampling_params.height
        if len(states) > (7 if height == 8 else room):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3.00 GiB")
        return denoise_step(states)

    adapter.denoise_step = with_little_memory  # type: ignore[method-assign]
    with pytest.raises(ConfigurationError) as failed:
        warm_up(adapter, config(warmup_shapes=(SamplingParams(height=16),)))
    message = str(failed.value)
    assert message.startswith("warm-up: a wave of 8 requests at height=8 does not fit in memory (cpu: ")
    assert "CUDA out of memory. Tried to allocate 3.00 GiB" in message
    assert f"The largest that fits is {room}: set max_num_seqs (max_batch_size) from 8 to {room}" in message


def test_where_not_even_one_request_fits_other_remedies_are_named() -> None:
    adapter = CountingAdapter()

    def fail() -> None:
        raise MemoryError

    adapter.before_step = fail
    with pytest.raises(ConfigurationError, match="Not even one request fits: choose a smaller size .*dtype bfloat16"):
        warm_up(adapter, config(max_num_seqs=1))


def test_lack_of_memory_is_known_by_its_cause() -> None:
    try:
        torch.empty(2**60, dtype=torch.uint8)
    except RuntimeError as error:
        wrapped = ValueError("wrapped")
        wrapped.__cause__ = error
    assert is_out_of_memory(wrapped)
    assert is_out_of_memory(MemoryError())
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory"))
    assert not is_out_of_memory(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))


def test_after_a_warm_up_a_request_is_what_the_stock_call_gives() -> None:
    pipeline = stable_diffusion_3()
    adapter = adapter_for(pipeline, config(max_num_seqs=4))
    warm_up(adapter, adapter.config)
    request = mixed_requests(1)[0]
    request.sampling_params = request.sampling_params.with_defaults(adapter.defaults)
    (output,) = adapter.forward(DiffusionRequestBatch([request]))
    (stock,) = stock_call(stable_diffusion_3(), request, "np")
    assert output.output is not None
    assert np.array_equal(output.output[0], (stock * 255).round().astype(np.uint8))


def test_a_class_of_ones_own_that_has_only_a_forward_gets_a_whole_wave() -> None:
    class Whole(StockAdapter):
        supports_request_batch = True

        def forward(self, batch: DiffusionRequestBatch) -> list[DiffusionOutput]:
            sizes.append(batch.num_reqs)
            if batch.num_reqs > room:
                raise MemoryError
            return super().forward(batch)

    sizes: list[int] = []
    adapter = Whole(pixart_alpha(), config(max_num_seqs=3))
    room = 3
    warm_up(adapter, adapter.config)
    assert sizes == [3]
    room = 1
    with pytest.raises(ConfigurationError, match="MemoryError.* The largest that fits is 1: set max"):
        warm_up(adapter, adapter.config)


def test_an_input_image_is_made_for_a_pipeline_that_needs_one() -> None:
    pipeline = BY_NAME["StableDiffusion3Img2Img"].build()
    params = SamplingParams(height=32, width=16, max_sequence_length=32, strength=0.1)
    adapter: Any = adapter_for(pipeline, config(max_num_seqs=2, default_sampling_params=params))
    images: list[Any] = []
    prepare_encode = adapter.prepare_encode

    def watched(request: OmniDiffusionRequest) -> Any:
        images.append(request.image)
        state = prepare_encode(request)
        assert len(state.timesteps) == 2, "all steps are run, whatever the strength"
        return state

    adapter.prepare_encode = watched
    warm_up(adapter, adapter.config)
    assert [image.shape for image in images] == [(32, 16, 3)] * 2
