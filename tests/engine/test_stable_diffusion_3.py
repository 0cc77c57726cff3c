"""Fused equals alone: every request of a wave against the stock StableDiffusion3Pipeline call of that request."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler

from tests.example_requests import mixed_requests, stock_call
from tests.families import BY_NAME
from tests.tiny_pipelines import stable_diffusion_3
from triton_diffusion.adapters import StableDiffusion3Adapter
from triton_diffusion.batch import DiffusionRequestBatch
from triton_diffusion.config import EngineConfig
from triton_diffusion.errors import FieldValueError, NonFiniteError
from triton_diffusion.request import OmniDiffusionRequest
from triton_diffusion.sampling_params import SamplingParams

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.05}


def adapter_of(pipeline: Any, max_num_seqs: int = 8, **config: Any) -> StableDiffusion3Adapter:
    return StableDiffusion3Adapter(pipeline, EngineConfig(max_num_seqs=max_num_seqs, model="tiny", **config))


def fused_latents(adapter: StableDiffusion3Adapter, requests: list[OmniDiffusionRequest]) -> list[torch.Tensor]:
    """The final latents of requests that run in one wave."""
    states = [adapter.prepare_encode(request) for request in requests]
    adapter.denoise(states)
    return [state.latents for state in states]


def difference(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one.float() - other.float()).abs().max())


@pytest.fixture(scope="module", params=[torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def pipeline(request: pytest.FixtureRequest) -> Any:
    return stable_diffusion_3(dtype=request.param)


@pytest.mark.parametrize("changed", ["prompt", "seed", "guidance_scale", "negative_prompt"])
def test_the_comparison_notices_a_mix_up(pipeline: Any, changed: str) -> None:
    # Were a request to get another one's prompt, seed or scale, the tests above would fail: so big is the difference.
    requests = mixed_requests(4)
    first = requests[0]
    values = {**first.sampling_params.given(), "request_id": first.request_id}
    other = OmniDiffusionRequest(
        prompt=requests[3].prompt if changed == "prompt" else first.prompt,
        negative_prompt="something else" if changed == "negative_prompt" else first.negative_prompt,
        request_id="other",
        sampling_params=SamplingParams(
            **{
                **{name: value for name, value in values.items() if name != "request_id"},
                **({"seed": 1} if changed == "seed" else {}),
                **({"guidance_scale": 9.1} if changed == "guidance_scale" else {}),
            }  # type: ignore[arg-type]
        ),
    )
    fused = fused_latents(adapter_of(pipeline), [other, *requests[1:]])[0]
    assert difference(fused, stock_call(pipeline, first, "latent")) > TOLERANCE[torch.float32]


def test_forward_returns_the_pictures_of_each_request() -> None:
    pipeline = stable_diffusion_3()
    requests = mixed_requests(5)
    outputs = adapter_of(pipeline).forward(DiffusionRequestBatch(requests))
    for request, output in zip(requests, outputs, strict=True):
        alone = np.stack([np.asarray(image) for image in stock_call(pipeline, request, "pil")])
        assert output.output is not None
        assert output.output.shape == alone.shape
        assert np.abs(output.output.astype(int) - alone).max() <= 1
        assert output.num_inference_steps == request.sampling_params.num_inference_steps


def test_more_rows_than_max_num_seqs_run_in_bounded_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    pipeline = stable_diffusion_3()
    request = mixed_requests(5)[4]  # three images, with guidance
    rows: list[int] = []
    stock_forward = pipeline.transformer.forward

    def counted(hidden_states: torch.Tensor, **arguments: Any) -> Any:
        rows.append(len(hidden_states))
        return stock_forward(hidden_states=hidden_states, **arguments)

    monkeypatch.setattr(pipeline.transformer, "forward", counted)
    fused = fused_latents(adapter_of(pipeline, max_num_seqs=2), [request])[0]
    assert max(rows) == 4, "two for each of max_num_seqs: one for the prompt, one for the negative prompt"
    assert difference(fused, stock_call(pipeline, request, "latent")) <= 1e-4


def test_each_request_shifts_its_timesteps_by_its_own_size() -> None:
    scheduler = FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True, base_image_seq_len=4, max_image_seq_len=256)
    pipeline = stable_diffusion_3(scheduler=scheduler)
    for size in (16, 64):
        request = mixed_requests(1, height=size, width=size)[0]
        fused = fused_latents(adapter_of(pipeline), [request])[0]
        assert torch.equal(fused, stock_call(pipeline, request, "latent"))


def test_stochastic_sampling_draws_from_each_rows_own_generator() -> None:
    # The stock call draws from the global generator: not even alone does it make the same picture twice.
    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0, stochastic_sampling=True)
    adapter = adapter_of(stable_diffusion_3(scheduler=scheduler))
    requests = mixed_requests(4)
    fused = fused_latents(adapter, requests)
    for request, latents in zip(requests, fused, strict=True):
        torch.manual_seed(1234)
        assert difference(fused_latents(adapter, [request])[0], latents) <= 1e-4


@pytest.mark.parametrize("given", [{"height": 34}, {"width": 33}])
def test_flux_refuses_sizes_that_its_stock_call_rounds_down(given: dict[str, int]) -> None:
    family = BY_NAME["Flux"]
    adapter = family.adapter(family.build())
    with pytest.raises(FieldValueError, match="must be a multiple of 4; the nearest is 32 or 36"):
        adapter.check_request(family.requests(adapter, 1, **given)[0])


def test_defaults_are_the_pipelines_own_where_config_pbtxt_gives_none() -> None:
    adapter = adapter_of(stable_diffusion_3(), default_sampling_params=SamplingParams(num_inference_steps=9))
    assert adapter.defaults == SamplingParams(
        height=64,
        width=64,
        num_inference_steps=9,
        guidance_scale=7.0,
        num_images_per_prompt=1,
        max_sequence_length=256,
    )


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"height": 30}, "height=30: must be a multiple of 4; the nearest is 28 or 32"),
        ({"width": 2}, "width=2: must be a multiple of 4; the nearest is 4"),
        ({"height": 512, "width": 512}, "height=512: this model makes pictures of at most 256 pixels a side"),
        ({"max_sequence_length": 513}, "max_sequence_length=513: must be at most 512 for this pipeline"),
    ],
)
def test_what_the_pipeline_would_refuse_is_refused_at_once(given: dict[str, int], message: str) -> None:
    with pytest.raises(FieldValueError, match=message):
        adapter_of(stable_diffusion_3()).check_request(mixed_requests(1, **given)[0])


def test_the_number_of_pixels_is_bounded_by_the_config() -> None:
    adapter = adapter_of(stable_diffusion_3(), max_pixels=64 * 64)
    with pytest.raises(FieldValueError, match="height=64 width=128: too many pixels, at most 4096 .max_pixels"):
        adapter.check_request(mixed_requests(1, height=64, width=128)[0])


def test_the_key_holds_only_what_one_pass_cannot_vary() -> None:
    pipeline = stable_diffusion_3()
    first, *others = mixed_requests(8)
    adapter, strict = adapter_of(pipeline), adapter_of(pipeline, strict_batch_key=True)
    assert all(adapter.key(other) == adapter.key(first) for other in others)
    assert all(strict.key(other) != strict.key(first) for other in others)
    wider = mixed_requests(1, width=64)[0]
    assert adapter.key(wider) != adapter.key(first)


def test_latents_that_are_not_finite_are_an_error_and_no_black_picture() -> None:
    adapter = adapter_of(stable_diffusion_3())
    state = adapter.prepare_encode(mixed_requests(1)[0])
    state.latents[0, 0, 0, 0] = float("nan")
    with pytest.raises(NonFiniteError, match="not finite"):
        adapter.post_decode(state)
