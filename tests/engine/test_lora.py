"""LoRA adapters: whatever shares the wave, a request gets what stock diffusers makes of it with its own adapters."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from tests.engine.staggered import TOGETHER, difference, run_staggered
from tests.families import FAMILIES, Family
from tests.tiny_loras import load_into_stock, set_stock_adapters, write_loras
from triton_diffusion.lora.files import find_loras
from triton_diffusion.lora.loading import load_loras
from triton_diffusion.request import OmniDiffusionRequest

# A family with another scheduler has the same layers.
LORA_FAMILIES = [family for family in FAMILIES if "XL-" not in family.name]

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 0.05}

LORAS = ("ink", None, "night:0.5", "wide", "ink:2", "ink:0.8,night:-0.3", None, "wide:0.7")
"""What the rows of a mixed wave want."""


class Served(NamedTuple):
    """A family's tiny pipeline, the same with its adapters loaded by stock diffusers, and where the adapters are."""

    family: Family
    build: Any
    stock: Any
    directory: Path

    def adapter(self, pipeline: Any, **config: Any) -> Any:
        """An engine's adapter for a new pipeline with the LoRA adapters of the directory."""
        adapter = self.family.adapter(pipeline, lora_directory=str(self.directory), **config)
        files = find_loras(adapter.config.lora_directory, {}, Path())
        adapter.loras = load_loras(pipeline, files, adapter.config)
        return adapter

    def requests(self, adapter: Any, loras: tuple[str | None, ...] = LORAS) -> list[OmniDiffusionRequest]:
        requests = self.family.requests(adapter, len(loras), num_images_per_prompt=1)
        requests = [with_lora(request, lora) for request, lora in zip(requests, loras, strict=True)]
        requests[-1] = with_lora(requests[-1], loras[-1], num_images_per_prompt=2)  # whose two rows want the same
        return requests

    def stock_call(self, request: OmniDiffusionRequest) -> torch.Tensor:
        set_stock_adapters(self.stock, request)
        latents: torch.Tensor = self.family.stock_call(self.stock, request, "latent")
        return latents


def with_lora(request: OmniDiffusionRequest, lora: str | None, **sampling: Any) -> OmniDiffusionRequest:
    return dataclasses.replace(
        request, sampling_params=dataclasses.replace(request.sampling_params, lora=lora, **sampling)
    )


@pytest.fixture(scope="module", params=LORA_FAMILIES, ids=lambda family: family.name)
def family(request: pytest.FixtureRequest) -> Family:
    return request.param  # type: ignore[no-any-return]


@pytest.fixture(scope="module", params=[torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def served(family: Family, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Served:
    def build() -> Any:
        return family.build(dtype=request.param)

    directory = tmp_path_factory.mktemp("loras")
    stock = build()
    names = write_loras(build, directory, text_encoder="text_encoder" in stock._lora_loadable_modules)
    load_into_stock(stock, directory, names)
    return Served(family, build, stock, directory)


def test_each_row_of_a_mixed_wave_equals_its_own_run_through_stock_diffusers(served: Served) -> None:
    adapter = served.adapter(served.build(), lora_mixed=True)
    requests = served.requests(adapter)
    assert len({adapter.key(request) for request in requests}) == 1
    replies = run_staggered(adapter, requests, TOGETHER)
    for request in requests:
        receipt = replies[request.request_id].receipt
        assert receipt is not None, replies[request.request_id].wait()
        assert receipt.wave_size == len(LORAS)
        apart = difference(adapter.latents[request.request_id], served.stock_call(request))
        assert apart <= TOLERANCE[served.stock.dtype], request.sampling_params.lora


def test_requests_with_their_own_adapters_join_and_leave_between_steps(served: Served) -> None:
    adapter = served.adapter(served.build(), lora_mixed=True, step_execution=True)
    requests = served.requests(adapter, ("ink", "wide", None, "night:0.5"))
    replies = run_staggered(adapter, requests)
    for request in requests:
        apart = difference(adapter.latents[request.request_id], served.stock_call(request))
        assert apart <= TOLERANCE[served.stock.dtype], request.sampling_params.lora
    assert max(reply.receipt.wave_size for reply in replies.values() if reply.receipt) >= 2


@pytest.mark.parametrize("served", [torch.float32], ids=["fp32"], indirect=True)
def test_what_an_adapter_changes_is_a_hundred_times_more_than_the_tolerance(served: Served) -> None:
    adapter = served.adapter(served.build())
    for request in served.requests(adapter, ("ink", "night:0.5", "wide:0.7")):
        base, changed = served.stock_call(with_lora(request, None)), served.stock_call(request)
        assert difference(base, changed) >= 100 * TOLERANCE[torch.float32]
