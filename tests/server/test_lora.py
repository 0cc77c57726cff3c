"""LoRA adapters on the real server: what a request names it gets, and nobody else."""

from __future__ import annotations

import asyncio
import json
import random
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from tests.server.conftest import metric, occupied, wait_for_waiting, wait_until_idle
from tests.server.repository import add_model
from tests.tiny_loras import ATTENTION, FEED_FORWARD, load_into_stock, set_stock_adapters, write_lora
from tests.tiny_pipelines import stable_diffusion_3
from triton_diffusion.embedded import TritonServer
from triton_diffusion.lora import LoraSelection
from triton_diffusion.receipt import Receipt
from triton_diffusion_client import (
    AsyncDiffusionClient,
    DiffusionClient,
    GenerationResult,
    InvalidRequestError,
    SamplingParams,
)

NAMES = [f"style-{number}" for number in range(20)]
"""Adapters of many ranks and of two sets of layers."""

DEFAULTS = {"height": 16, "width": 16, "num_inference_steps": 3, "max_sequence_length": 16}


@pytest.fixture(scope="module")
def lora_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("loras")
    pipeline = stable_diffusion_3()
    for number, name in enumerate(NAMES):
        targets = (*ATTENTION, *FEED_FORWARD) if number % 3 else ATTENTION
        write_lora(pipeline, directory / name, rank=1 + number % 7, seed=number, targets=targets)
    return directory


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, checkpoint: Path, lora_directory: Path) -> Iterator[TritonServer]:
    """Two models: `waves` has one selection of adapters in a wave, `mixed` another one in each row."""
    repository = tmp_path_factory.mktemp("repository")
    common: dict[str, Any] = {
        "lora_directory": str(lora_directory),
        "default_sampling_params": DEFAULTS,
        "warmup": "false",
    }
    add_model(repository, "waves", checkpoint, max_wait_ms=20, **common)
    add_model(repository, "mixed", checkpoint, max_wait_ms=0, lora_mixed="true", step_execution="true", **common)
    with TritonServer(repository) as server:
        yield server


@pytest.fixture(scope="module")
def stock_picture(lora_directory: Path) -> Any:
    """The picture of stock diffusers for a prompt, a seed and adapters."""
    pipeline = stable_diffusion_3()
    load_into_stock(pipeline, lora_directory, NAMES)

    @cache
    def picture(prompt: str, seed: int, lora: str) -> np.ndarray[Any, Any]:
        import torch

        set_stock_adapters(pipeline, LoraSelection.of(SamplingParams(lora=lora)))
        generator = torch.Generator().manual_seed(seed)
        return np.asarray(pipeline(prompt, generator=generator, **DEFAULTS).images[0], dtype=int)

    return picture


def difference(result: GenerationResult, picture: np.ndarray[Any, Any]) -> int:
    """Of 255."""
    return int(np.abs(np.asarray(result.raise_for_error().images[0], dtype=int) - picture).max())


def receipt_of(result: GenerationResult) -> Receipt:
    receipt = result.raise_for_error().receipt
    assert receipt is not None
    return receipt


def test_users_with_different_adapters_share_a_wave(server: TritonServer, stock_picture: Any) -> None:
    loras = ["style-1", "", "style-2:0.5", "style-1:-1,style-3:0.25", "style-4"]
    with DiffusionClient(server.grpc_url, "mixed") as client, occupied(server, "mixed"):
        results = client.generate(["a cat"] * 5, [SamplingParams(seed=7, lora=lora) for lora in loras])
    for lora, result in zip(loras, results, strict=True):
        assert difference(result, stock_picture("a cat", 7, lora)) <= 1
        receipt = receipt_of(result)
        assert receipt.wave_size > 1, "beside the long request, if no other"
        assert receipt.sampling_params.lora == lora
    assert len({result.images[0].tobytes() for result in results}) == 5


def test_by_default_the_adapter_is_in_the_key(server: TritonServer, stock_picture: Any) -> None:
    loras = ["style-1", "style-2", "style-1:1", "", "style-1"]
    params = [SamplingParams(seed=7, lora=lora) for lora in loras]
    with DiffusionClient(server.grpc_url, "waves") as client, ThreadPoolExecutor() as executor:
        with occupied(server, "waves"):
            answers = executor.submit(client.generate, ["a cat"] * 5, params)
            wait_for_waiting(server, "waves", 5)
        results = answers.result()
    assert [receipt_of(result).wave_size for result in results] == [3, 1, 3, 1, 3]
    assert "lora=style-1:1" in receipt_of(results[0]).key
    for lora, result in zip(loras, results, strict=True):
        assert difference(result, stock_picture("a cat", 7, lora)) <= 1


def test_a_scale_for_all_of_a_requests_adapters(server: TritonServer, stock_picture: Any) -> None:
    params = SamplingParams(seed=7, lora="style-1,style-2:0.5", lora_scale=0.5)
    with DiffusionClient(f"http://{server.http_url}", "mixed") as client:
        result = client.generate("a cat", params)[0]
    assert difference(result, stock_picture("a cat", 7, "style-1:0.5,style-2:0.25")) <= 1


@pytest.mark.parametrize("model", ["waves", "mixed"])
@pytest.mark.parametrize("lora", ["style-99", "../style-1", "style-1.safetensors", "style-1:much", "style-1,,"])
def test_what_is_no_adapter_is_refused_and_what_there_is_listed(server: TritonServer, model: str, lora: str) -> None:
    with DiffusionClient(server.grpc_url, model) as client:
        error = client.generate("a cat", SamplingParams(lora=lora))[0].error
    assert isinstance(error, InvalidRequestError)
    assert f"lora={lora!r}" in str(error)
    assert "style-0, style-1, style-10" in str(error) or "must be names of adapters" in str(error)


def test_curl_names_an_adapter_too(server: TritonServer) -> None:
    def generate(lora: str) -> Any:
        body = json.dumps({"prompt": "a cat", "seed": 1, "lora": lora}).encode()
        url = f"http://{server.http_url}/v2/models/mixed/generate"
        return json.load(urllib.request.urlopen(urllib.request.Request(url, body)))

    assert generate("style-1")["generated_image"] != generate("")["generated_image"]
    with pytest.raises(urllib.error.HTTPError) as raised:
        generate("styel-1")
    assert "did you mean 'style-1'" in raised.value.read().decode()


@pytest.mark.parametrize(("model", "count"), [("waves", 300), ("mixed", 1000)])
def test_a_thousand_requests_over_twenty_adapters(
    server: TritonServer, stock_picture: Any, model: str, count: int
) -> None:
    chance = random.Random(model)
    choices = [
        *NAMES,
        "",
        *(f"{name}:{0.25 * number}" for number, name in enumerate(NAMES[1:6], 1)),
        "style-2,style-7",
    ]
    stub = max(psutil.Process(server.pid).children(), key=lambda child: model in " ".join(child.cmdline()))
    fates: Counter[str] = Counter()

    async def one(client: AsyncDiffusionClient) -> None:
        prompt, seed, lora = chance.choice(["a cat", "a blue dog"]), chance.randrange(2), chance.choice(choices)
        fate = chance.choices(["answered", "cancelled", "unknown", "too late"], [85, 8, 4, 3])[0]
        fates[fate] += 1
        if fate == "unknown":
            assert "there is no adapter" in str((await client.generate(prompt, SamplingParams(lora="who")))[0].error)
        elif fate == "too late":
            await asyncio.to_thread(expires, server, model, lora)
        else:
            params = SamplingParams(seed=seed, lora=lora, num_inference_steps=None if fate == "answered" else 1000)
            task = asyncio.create_task(client.generate(prompt, params))
            if fate == "cancelled":
                await asyncio.sleep(chance.random())
                task.cancel()
            else:
                assert difference((await task)[0], stock_picture(prompt, seed, lora)) <= 1

    async def half() -> None:
        async with AsyncDiffusionClient(server.grpc_url, model) as client:
            await asyncio.gather(*(one(client) for _ in range(count // 2)))

    memory = []
    for _ in range(2):
        asyncio.run(half())
        wait_until_idle(server, model)
        memory.append(stub.memory_info().rss)
    assert fates.total() == count
    assert set(fates) == {"answered", "cancelled", "unknown", "too late"}, "every fate is among them"
    assert metric(server, model, "triton_diffusion_live_states") == 0
    assert memory[1] < memory[0] + 50 * 2**20


def expires(server: TritonServer, model: str, lora: str) -> None:
    """A long request that ends by its own timeout."""
    body = json.dumps({"prompt": "a cat", "lora": lora, "num_inference_steps": 1000, "timeout": 200_000}).encode()
    url = f"http://{server.http_url}/v2/models/{model}/generate"
    with pytest.raises(urllib.error.HTTPError) as raised:
        urllib.request.urlopen(urllib.request.Request(url, body))
    assert "timeout of 0.200 s has passed" in raised.value.read().decode()
