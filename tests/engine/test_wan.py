"""Fused equals alone: every request of a wave against the stock WanPipeline call of that request."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, WanPipeline

from tests.example_requests import mixed_requests
from tests.tiny_wan import wan, wan_2_2
from triton_diffusion.adapters import RequestState
from triton_diffusion.adapters.wan import WanAdapter
from triton_diffusion.batch import DiffusionRequestBatch
from triton_diffusion.config import EngineConfig
from triton_diffusion.errors import ConfigurationError, FieldValueError
from triton_diffusion.request import OmniDiffusionRequest
from triton_diffusion.sampling_params import SamplingParams

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.05}
GUIDANCE_SCALES_2 = (3.0, None, 5.0, 1.0, None, 6.5, 2.0, 4.0)
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])


class Observed(WanAdapter):
    """Keeps the final latents, which the stock call can be asked for as well."""

    def __init__(self, pipeline: Any, config: EngineConfig) -> None:
        super().__init__(pipeline, config)
        self.latents: dict[str, torch.Tensor] = {}

    def decode(self, state: RequestState) -> Any:
        self.latents[state.request.request_id] = state.latents
        return super().decode(state)


def adapter_of(pipeline: Any, max_num_seqs: int = 8, **config: Any) -> Observed:
    return Observed(pipeline, EngineConfig(max_num_seqs=max_num_seqs, model="tiny", **config))


def wan_requests(pipeline: Any, count: int, **common: Any) -> list[OmniDiffusionRequest]:
    """Requests of one key that differ in everything that may differ; guidance_scale_2 only where there is a use."""
    requests = mixed_requests(count, **{"num_frames": 5, "height": 16, **common})
    if pipeline.config.boundary_ratio is not None:
        for request, scale in zip(requests, GUIDANCE_SCALES_2, strict=False):
            request.sampling_params = dataclasses.replace(request.sampling_params, guidance_scale_2=scale)
    return requests


def stock_call(pipeline: Any, request: OmniDiffusionRequest, output_type: str) -> Any:
    """The stock pipeline's own result for one request alone."""
    arguments = request.sampling_params.given()
    del arguments["seed"]
    return pipeline(
        request.prompt,
        negative_prompt=request.negative_prompt,
        generator=[torch.Generator().manual_seed(seed) for seed in request.sampling_params.row_seeds()],
        num_videos_per_prompt=arguments.pop("num_images_per_prompt"),
        output_type=output_type,
        **arguments,
    ).frames


def fused_latents(adapter: WanAdapter, requests: list[OmniDiffusionRequest]) -> list[torch.Tensor]:
    """The final latents of requests that run in one wave."""
    return denoised(adapter, [adapter.prepare_encode(request) for request in requests])


def denoised(adapter: WanAdapter, states: list[RequestState]) -> list[torch.Tensor]:
    """The final latents of prepared requests that run in one wave."""
    adapter.denoise(states)
    return [state.latents for state in states]


def difference(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one.float() - other.float()).abs().max())


@pytest.fixture(scope="module", params=["2.1 fp32", "2.1 bf16", "2.2 fp32", "2.2 bf16"])
def pipeline(request: pytest.FixtureRequest) -> Any:
    version, dtype = request.param.split()
    return {"2.1": wan, "2.2": wan_2_2}[version](dtype={"fp32": torch.float32, "bf16": torch.bfloat16}[dtype])


@pytest.fixture(scope="module")
def alone(pipeline: Any) -> list[torch.Tensor]:
    """The latents of the stock call of each of eight requests."""
    return [stock_call(pipeline, request, "latent") for request in wan_requests(pipeline, 8)]


@pytest.mark.parametrize("changed", ["prompt", "negative_prompt", "seed", "guidance_scale", "guidance_scale_2"])
def test_the_comparison_notices_a_mix_up(changed: str) -> None:
    # Were a request to get another one's prompt, seed or scale, the tests above would fail: so big is the difference.
    pipeline = wan_2_2()
    first, *others = wan_requests(pipeline, 4)
    if changed in ("prompt", "negative_prompt"):
        other = dataclasses.replace(first, **{changed: "something else"})  # type: ignore[arg-type]
    else:
        value = {"seed": 1, "guidance_scale": 9.1, "guidance_scale_2": 9.1}[changed]
        params = dataclasses.replace(first.sampling_params, **{changed: value})  # type: ignore[arg-type]
        other = dataclasses.replace(first, sampling_params=params)
    fused = fused_latents(adapter_of(pipeline), [other, *others])[0]
    assert difference(fused, stock_call(pipeline, first, "latent")) > TOLERANCE[torch.float32]


def test_both_transformers_run_in_one_step_when_rows_are_on_both_sides_of_the_boundary(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pipeline = wan_2_2()
    adapter = adapter_of(pipeline)
    late, early, three_videos = (wan_requests(pipeline, 5)[number] for number in (0, 1, 4))
    states = [adapter.prepare_encode(request) for request in (late, early, three_videos)]
    for state in (states[0], states[2]):
        while not adapter.is_below_boundary(state):
            adapter.step_scheduler(state, adapter.denoise_step([state])[0])
    alone = [adapter.denoise_step([state])[0] for state in states]

    rows: dict[str, list[int]] = {"transformer": [], "transformer_2": []}
    for name, counts in rows.items():
        transformer = getattr(pipeline, name)

        def counted(
            hidden_states: torch.Tensor,
            *,
            counts: list[int] = counts,
            stock: Any = transformer.forward,
            **arguments: Any,
        ) -> Any:
            counts.append(len(hidden_states))
            return stock(hidden_states=hidden_states, **arguments)

        monkeypatch.setattr(transformer, "forward", counted)
    together = adapter.denoise_step(states)
    assert rows == {"transformer": [2, 2], "transformer_2": [4, 4]}, "once for the prompts, once for the negatives"
    for one, other in zip(together, alone, strict=True):
        assert difference(one, other) <= 1e-5, "and every request got its own rows back"


@DTYPES
def test_flow_match_euler_equals_the_stock_call(dtype: torch.dtype) -> None:
    pipeline = wan_2_2(dtype=dtype, scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0))
    requests = wan_requests(pipeline, 4)
    alone = [stock_call(pipeline, request, "latent") for request in requests]
    for request, stock in zip(requests, alone, strict=True):
        # In bfloat16 this scheduler rounds the stock call's latents to bfloat16: the same numbers in another dtype.
        assert torch.equal(fused_latents(adapter_of(pipeline), [request])[0], stock.float())
    for fused, stock in zip(fused_latents(adapter_of(pipeline), requests), alone, strict=True):
        assert difference(fused, stock) <= TOLERANCE[dtype]


@DTYPES
def test_timesteps_for_each_token_equal_the_stock_call(dtype: torch.dtype) -> None:
    pipeline = wan(dtype=dtype, expand_timesteps=True)
    requests = wan_requests(pipeline, 4)
    alone = [stock_call(pipeline, request, "latent") for request in requests]
    for request, stock in zip(requests, alone, strict=True):
        assert torch.equal(fused_latents(adapter_of(pipeline), [request])[0], stock)
    for fused, stock in zip(fused_latents(adapter_of(pipeline), requests), alone, strict=True):
        assert difference(fused, stock) <= TOLERANCE[dtype]


def test_a_checkpoint_that_keeps_some_weights_in_float32(tmp_path: Path) -> None:
    # So from_pretrained loads Wan in bfloat16: the norms and the time embedder stay as they are.
    wan_2_2().save_pretrained(tmp_path)
    pipeline = WanPipeline.from_pretrained(tmp_path, dtype=torch.bfloat16)
    pipeline.set_progress_bar_config(disable=True)
    assert pipeline.transformer.scale_shift_table.dtype == torch.float32
    requests = wan_requests(pipeline, 3)
    for request, fused in zip(requests, fused_latents(adapter_of(pipeline), requests), strict=True):
        stock = stock_call(pipeline, request, "latent")
        assert torch.equal(fused_latents(adapter_of(pipeline), [request])[0], stock)
        assert difference(fused, stock) <= TOLERANCE[torch.bfloat16]


def test_forward_returns_the_videos_of_each_request(pipeline: Any) -> None:
    requests = wan_requests(pipeline, 3, num_frames=9)
    outputs = adapter_of(pipeline).forward(DiffusionRequestBatch(requests))
    for request, output in zip(requests, outputs, strict=True):
        alone = stock_call(pipeline, request, "np")
        assert output.output is not None
        assert output.output.dtype == np.uint8
        assert output.output.shape == (request.sampling_params.num_images_per_prompt, 9, 16, 32, 3)
        assert np.abs(output.output.astype(int) - (alone * 255).round()).max() <= 1
        assert output.num_inference_steps == request.sampling_params.num_inference_steps


def test_defaults_are_the_pipelines_own_where_config_pbtxt_gives_none() -> None:
    adapter = adapter_of(wan(), default_sampling_params=SamplingParams(num_inference_steps=9))
    assert adapter.defaults == SamplingParams(
        height=480,
        width=832,
        num_frames=81,
        num_inference_steps=9,
        guidance_scale=5.0,
        num_images_per_prompt=1,
        max_sequence_length=512,
    )


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"num_frames": 8}, "num_frames=8: must be a multiple of 4 plus 1; the nearest is 5 or 9"),
        ({"num_frames": 2}, "num_frames=2: must be a multiple of 4 plus 1; the nearest is 1 or 5"),
        ({"height": 40}, "height=40: must be a multiple of 16; the nearest is 32 or 48"),
        ({"width": 8}, "width=8: must be a multiple of 16; the nearest is 16"),
        ({"max_sequence_length": 513}, "max_sequence_length=513: must be at most 512 for this pipeline"),
        ({"guidance_scale_2": 3.0}, "guidance_scale_2=3.0: this model has no second transformer"),
    ],
)
def test_what_the_stock_call_would_refuse_or_change_is_refused_at_once(given: dict[str, Any], message: str) -> None:
    pipeline = wan()
    with pytest.raises(FieldValueError, match=message):
        adapter_of(pipeline).check_request(wan_requests(pipeline, 1, **given)[0])


def test_sizes_are_whole_patches_of_the_models_own_autoencoder() -> None:
    # Wan 2.2 TI2V has an autoencoder of 16 pixels a latent; the stock call would make 32 pixels of 48.
    pipeline = wan(expand_timesteps=True)
    pipeline.vae_scale_factor_spatial = 16
    with pytest.raises(FieldValueError, match="height=48: must be a multiple of 32; the nearest is 32 or 64"):
        adapter_of(pipeline).check_request(wan_requests(pipeline, 1, height=48)[0])


@pytest.mark.parametrize("num_frames", [1, 5, 81])
def test_numbers_of_frames_that_are_right_are_taken(num_frames: int) -> None:
    for pipeline in (wan(), wan_2_2()):
        adapter_of(pipeline).check_request(wan_requests(pipeline, 1, num_frames=num_frames)[0])


@pytest.mark.parametrize("missing", ["transformer", "transformer_2"])
def test_a_model_that_lacks_a_transformer_is_refused_at_load(missing: str) -> None:
    pipeline = wan_2_2()
    setattr(pipeline, missing, None)
    with pytest.raises(ConfigurationError, match=f"boundary_ratio=0.875 needs {missing}, which the model lacks"):
        adapter_of(pipeline)


def test_the_second_transformer_alone_will_do_where_every_step_is_below_the_boundary() -> None:
    pipeline = wan_2_2()
    pipeline.transformer = None
    pipeline.register_to_config(boundary_ratio=1.0)
    request = wan_requests(pipeline, 1)[0]
    assert torch.equal(fused_latents(adapter_of(pipeline), [request])[0], stock_call(pipeline, request, "latent"))


def test_the_key_holds_only_what_one_pass_cannot_vary() -> None:
    pipeline = wan_2_2()
    first, *others = wan_requests(pipeline, 8)
    adapter = adapter_of(pipeline)
    assert all(adapter.key(other) == adapter.key(first) for other in others)
    longer = wan_requests(pipeline, 1, num_frames=9)[0]
    assert adapter.key(longer) != adapter.key(first)
