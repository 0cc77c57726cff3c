"""diffusers' own switches, prompts encoded once, and decoding in larger parts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch._dynamo.testing import CompileCounter

from tests.example_requests import mixed_requests
from tests.families import BY_NAME, Family
from tests.tiny_pipelines import flux, stable_diffusion_3
from triton_diffusion.adapters import StableDiffusion3Adapter, StockAdapter, load_adapter
from triton_diffusion.adapters.loading import call_switches, check_switches
from triton_diffusion.adapters.prompt_cache import PromptCache
from triton_diffusion.batch import DiffusionRequestBatch
from triton_diffusion.config import EngineConfig
from triton_diffusion.errors import ConfigurationError


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("checkpoint")
    stable_diffusion_3().save_pretrained(path)
    return path


def load(checkpoint: Path, **calls: Any) -> Any:
    return load_adapter(EngineConfig(model=str(checkpoint), max_num_seqs=8, pipeline_calls=calls))


def test_methods_of_components_are_called_with_their_arguments(checkpoint: Path) -> None:
    adapter = load(checkpoint, **{"vae.enable_tiling": {}, "set_progress_bar_config": {"leave": False}})
    assert adapter.pipeline.vae.use_tiling


@pytest.mark.parametrize(
    ("calls", "message"),
    [
        ({"vae.enable_tilling": {}}, "pipeline_calls: vae.enable_tilling: .*no attribute 'enable_tilling'"),
        (
            {"vae.enable_tiling": {"size": 3}},
            "pipeline_calls: vae.enable_tiling: .*unexpected keyword .*'size'",
        ),
        ({"transformer.enable_cache": {"config": None}}, "pipeline_calls: transformer.enable_cache: "),
    ],
)
def test_a_switch_that_does_not_exist_is_named(checkpoint: Path, calls: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        load(checkpoint, **calls)


def test_a_cache_across_steps_is_refused_where_requests_are_fused() -> None:
    calls = {"transformer.enable_cache": {"config": {"class": "FirstBlockCacheConfig", "threshold": 0.1}}}
    config = EngineConfig(model="tiny", max_num_seqs=8, pipeline_calls=calls)
    fused, stock = StableDiffusion3Adapter(stable_diffusion_3(), config), StockAdapter(flux(), config)
    with pytest.raises(ConfigurationError, match="requests that are fused would get each other's"):
        check_switches(fused, config)
    check_switches(stock, config)
    call_switches(stock.pipeline, calls)
    assert stock.pipeline.transformer.is_cache_enabled


@pytest.mark.parametrize(
    ("family", "switch"),
    [
        (BY_NAME["Flux"], "transformer.compile_repeated_blocks"),
        (BY_NAME["QwenImage"], "transformer.compile_repeated_blocks"),  # whose texts are of all lengths
        (BY_NAME["StableDiffusion3"], "transformer.compile"),
    ],
    ids=["Flux", "QwenImage", "StableDiffusion3"],
)
def test_waves_of_all_sizes_are_compiled_once(compile_counter: CompileCounter, family: Family, switch: str) -> None:
    pipeline = family.build()
    call_switches(pipeline, {switch: {"backend": compile_counter}})
    adapter = family.adapter(pipeline, max_num_seqs=4, batch_invariant=True)
    adapter.forward(DiffusionRequestBatch(family.requests(adapter, 1)))
    graphs = compile_counter.frame_count
    assert graphs > 0
    for count in (2, 3, 4):
        adapter.forward(DiffusionRequestBatch(family.requests(adapter, count)))
    assert compile_counter.frame_count == graphs


def test_a_prompt_is_encoded_once_for_all_requests_that_use_it() -> None:
    calls: list[str] = []

    def encode_prompt(prompt: str, device: Any = None) -> tuple[str, Any]:
        calls.append(prompt)
        return (prompt, device)

    cache = PromptCache(encode_prompt, size=2)
    for prompt in ("a", "a", "b", "a", "c", "a", "b"):
        assert cache(prompt, device=torch.device("cpu")) == (prompt, torch.device("cpu"))
    assert calls == ["a", "b", "c", "b"], "the least recently used one was forgotten"


def test_images_of_one_prompt_are_encoded_once() -> None:
    pipeline = stable_diffusion_3()
    calls = 0
    encode = pipeline.text_encoder.forward

    def counted(*arguments: Any, **named: Any) -> Any:
        nonlocal calls
        calls += 1
        return encode(*arguments, **named)

    pipeline.text_encoder.forward = counted
    adapter = StableDiffusion3Adapter(pipeline, EngineConfig(model="tiny", max_num_seqs=8))
    for images in (1, 2, 3):
        adapter.prepare_encode(mixed_requests(1, num_images_per_prompt=images)[0])
    assert calls == 2, "the prompt, and the negative prompt"


def test_an_image_beside_the_prompt_is_not_mistaken_for_another() -> None:
    cache = PromptCache(lambda prompt, image: (prompt, image.max()), size=2)
    assert [cache("a", image=np.full(1, value)) for value in (1, 2)] == [("a", 1), ("a", 2)]


def test_larger_parts_decode_to_the_same_pictures() -> None:
    pipeline = stable_diffusion_3()
    request = mixed_requests(5)[4]  # three images
    one, three = (
        StableDiffusion3Adapter(pipeline, EngineConfig(model="tiny", max_num_seqs=8, decode_batch_size=size))
        .forward(DiffusionRequestBatch([request]))[0]
        .output
        for size in (1, 3)
    )
    assert one is not None
    assert three is not None
    assert np.abs(one.astype(int) - three.astype(int)).max() <= 1
