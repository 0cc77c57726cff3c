"""Every fused family, both modes: each request equals the stock call of it alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests.engine.staggered import TOGETHER, difference, run_staggered
from tests.families import FAMILIES, Family
from triton_diffusion.request import OmniDiffusionRequest

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.05}


@pytest.fixture(scope="module", params=FAMILIES, ids=lambda family: family.name)
def family(request: pytest.FixtureRequest) -> Family:
    return request.param  # type: ignore[no-any-return]


@pytest.fixture(scope="module", params=[torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def pipeline(family: Family, request: pytest.FixtureRequest) -> Any:
    return family.build(dtype=request.param)


def test_one_request_alone_is_bit_for_bit_the_stock_call(family: Family, pipeline: Any) -> None:
    adapter = family.adapter(pipeline)
    for request in family.requests(adapter, 8):
        if len(request.sampling_params.row_seeds()) > 1:
            continue  # rows of one request are a fused pass too
        adapter.check_request(request)
        run_staggered(adapter, [request])
        assert torch.equal(adapter.latents[request.request_id], family.stock_call(pipeline, request, "latent"))


@pytest.mark.parametrize("count", [2, 4, 8])
def test_a_wave_equals_the_stock_call_of_each(family: Family, pipeline: Any, count: int) -> None:
    adapter = family.adapter(pipeline)
    requests = family.requests(adapter, count)
    assert len({adapter.key(request) for request in requests}) == 1
    replies = run_staggered(adapter, requests, TOGETHER)
    for request in requests:
        receipt, output = replies[request.request_id].receipt, replies[request.request_id].wait()
        assert receipt is not None
        assert receipt.wave_size == count
        stock = family.stock_call(pipeline, request, "latent")
        assert difference(adapter.latents[request.request_id], stock) <= TOLERANCE[pipeline.dtype]
        if pipeline.dtype == torch.float32:
            pictures = np.stack(family.stock_call(pipeline, request, "np"))
            assert np.abs(output.output - (pictures * 255).round()).max() <= 1


def test_staggered_requests_equal_the_stock_call_of_each(family: Family, pipeline: Any) -> None:
    adapter = family.adapter(pipeline, step_execution=True)
    requests = family.requests(adapter, 8)
    replies = run_staggered(adapter, requests)
    assert max(reply.receipt.wave_size for reply in replies.values() if reply.receipt) >= 3
    for request in requests:
        stock = family.stock_call(pipeline, request, "latent")
        assert difference(adapter.latents[request.request_id], stock) <= TOLERANCE[pipeline.dtype]


def test_batch_invariant_gives_the_same_bits_whoever_the_neighbours_are(family: Family, pipeline: Any) -> None:
    def bits(requests: list[OmniDiffusionRequest], arrivals: tuple[int, ...], **config: Any) -> torch.Tensor:
        adapter = family.adapter(pipeline, batch_invariant=True, **config)
        run_staggered(adapter, requests, arrivals)
        latents: torch.Tensor = adapter.latents[mine.request_id]
        return latents

    few_steps = {"num_images_per_prompt": 1, "num_inference_steps": 3}
    mine, *others = family.requests(family.adapter(pipeline), 8, **few_steps)
    alone = bits([mine], TOGETHER)
    for count in range(1, 8):
        for position in range(8) if count == 7 else [count // 2]:
            requests = [*others[:position], mine, *others[position:count]]
            assert torch.equal(bits(requests, TOGETHER), alone), f"wave of {count + 1}, position {position}"
    for position in (0, 3, 7):
        requests = [*others[:position], mine, *others[position:]]
        staggered = bits(requests, (0, 0, 1, 1, 2, 2, 3, 3), step_execution=True)
        assert torch.equal(staggered, alone), f"staggered, position {position}"


@pytest.mark.parametrize("changed", ["prompt", "seed"])
def test_the_comparison_notices_a_mix_up(family: Family, changed: str) -> None:
    pipeline = family.build()
    adapter = family.adapter(pipeline)
    first, other = family.requests(adapter, 2, num_images_per_prompt=1)
    right = family.stock_call(pipeline, first, "latent")
    if changed == "prompt":
        first.prompt = other.prompt
    else:
        first.sampling_params = type(first.sampling_params)(**{**first.sampling_params.given(), "seed": 99})  # type: ignore[arg-type]
    run_staggered(adapter, [first, other], TOGETHER)
    assert difference(adapter.latents[first.request_id], right) > TOLERANCE[torch.float32]
