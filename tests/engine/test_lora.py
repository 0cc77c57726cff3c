"""LoRA adapters: whatever shares the wave, a request gets what stock diffusers makes of it with its own adapters."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.engine.served_loras import LORAS, Served, with_lora
from tests.engine.staggered import TOGETHER, difference, run_staggered
from tests.families import FAMILIES, Family
from tests.tiny_loras import load_into_stock, write_loras

# A family with another scheduler has the same layers.
LORA_FAMILIES = [family for family in FAMILIES if "XL-" not in family.name]

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 0.05}


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
        stock = served.stock_call(request)
        apart = difference(adapter.latents[request.request_id], stock)
        assert apart <= TOLERANCE[served.stock.dtype], request.sampling_params.lora
        if request.sampling_params.lora:
            # What the adapter changes: in float32 much more than the tolerance, in bfloat16 than what was found.
            effect = difference(served.stock_call(with_lora(request, None)), stock)
            assert effect >= (100 * TOLERANCE[torch.float32] if served.stock.dtype == torch.float32 else 2 * apart)


def test_requests_with_their_own_adapters_join_and_leave_between_steps(served: Served) -> None:
    adapter = served.adapter(served.build(), lora_mixed=True, step_execution=True)
    requests = served.requests(adapter, ("ink", "wide", None, "night:0.5"))
    replies = run_staggered(adapter, requests)
    for request in requests:
        apart = difference(adapter.latents[request.request_id], served.stock_call(request))
        assert apart <= TOLERANCE[served.stock.dtype], request.sampling_params.lora
    assert max(reply.receipt.wave_size for reply in replies.values() if reply.receipt) >= 2
