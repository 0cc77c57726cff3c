"""Fused equals alone: every request of a wave against the stock Qwen-Image or Qwen-Image-Edit call of that request."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import PIL.Image
import pytest
import torch

from tests.engine.staggered import run_staggered
from tests.example_requests import GUIDANCE_SCALES, mixed_requests
from tests.tiny_qwen_image import qwen_image, qwen_image_edit, resize_input_images_to_64_x_64_pixels
from triton_diffusion.adapters.qwen_image import QwenImageAdapter
from triton_diffusion.adapters.qwen_image_edit import QwenImageEditAdapter
from triton_diffusion.batch import DiffusionRequestBatch
from triton_diffusion.config import EngineConfig
from triton_diffusion.errors import FieldValueError, InvalidRequestError
from triton_diffusion.request import OmniDiffusionRequest

ADAPTERS = {"QwenImagePipeline": QwenImageAdapter, "QwenImageEditPipeline": QwenImageEditAdapter}
DTYPES = (torch.float32, torch.bfloat16)
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.05}
INPUT_SIZES = ((64, 64), (40, 42), (100, 96), (64, 64), (30, 30), (80, 78), (51, 50), (64, 64))
"""Height and width of input images that are all resized to 64x64."""


@pytest.fixture(scope="module", autouse=True)
def small_input_images() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        resize_input_images_to_64_x_64_pixels(monkeypatch)
        yield


@pytest.fixture(
    scope="module",
    params=itertools.product((qwen_image_edit,), DTYPES),  # what all families share is tested in test_families.py
    ids=("edit-fp32", "edit-bf16"),
)
def pipeline(request: pytest.FixtureRequest) -> Any:
    build, dtype = request.param
    return build(dtype=dtype)


def adapter_of(pipeline: Any, max_num_seqs: int = 8, **config: Any) -> Any:
    adapter = ADAPTERS[type(pipeline).__name__]
    return adapter(pipeline, EngineConfig(max_num_seqs=max_num_seqs, model="tiny", **config))


def picture(seed: int, height: int, width: int) -> np.ndarray[Any, Any]:
    """Two colors with a soft border: [height, width, 3]."""
    colors = np.random.default_rng(seed).uniform(0, 255, (2, 3))
    share = np.linspace(0, 1, height)[:, None, None] * np.linspace(0, 1, width)[None, :, None]
    pixels: np.ndarray[Any, Any] = (share * colors[0] + (1 - share) * colors[1]).astype(np.uint8)
    return pixels


def requests_for(pipeline: Any, count: int, **common: Any) -> list[OmniDiffusionRequest]:
    """Requests of one key that differ in everything that may differ."""
    requests = mixed_requests(count, **{"max_sequence_length": 128, **common})
    for number, request in enumerate(requests):
        request.sampling_params = dataclasses.replace(
            request.sampling_params, guidance_scale=None, true_cfg_scale=GUIDANCE_SCALES[number]
        )
        if type(pipeline).__name__ == "QwenImageEditPipeline":
            request.image = picture(number, *INPUT_SIZES[number])
    return requests


def changed(request: OmniDiffusionRequest, **params: Any) -> OmniDiffusionRequest:
    return dataclasses.replace(request, sampling_params=dataclasses.replace(request.sampling_params, **params))


def stock_call(
    pipeline: Any, request: OmniDiffusionRequest, seeds: Sequence[int], output_type: str = "latent", **given: Any
) -> Any:
    """The stock pipeline's own result for one request alone."""
    arguments = request.sampling_params.given()
    arguments.pop("seed")
    if request.image is not None:
        given = {"image": PIL.Image.fromarray(request.image), **given}
    return pipeline(
        prompt=request.prompt,
        negative_prompt=request.negative_prompt,
        generator=[torch.Generator().manual_seed(seed) for seed in seeds],
        output_type=output_type,
        **{**arguments, "num_images_per_prompt": len(seeds), **given},
    ).images


def alone(pipeline: Any, request: OmniDiffusionRequest, **given: Any) -> torch.Tensor:
    """The latents of one stock call for each image of the request: [rows, tokens, channels]."""
    seeds = request.sampling_params.row_seeds()
    return torch.cat([stock_call(pipeline, request, [seed], **given) for seed in seeds])


def fused_latents(adapter: Any, requests: list[OmniDiffusionRequest]) -> list[torch.Tensor]:
    """The final latents of requests that run in one wave."""
    states = [adapter.prepare_encode(request) for request in requests]
    adapter.denoise(states)
    return [state.latents for state in states]


def staggered_latents(
    adapter: Any, requests: list[OmniDiffusionRequest], monkeypatch: pytest.MonkeyPatch, **arrivals: Any
) -> list[torch.Tensor]:
    """The final latents of requests that join and leave at different steps."""
    latents: dict[str, list[torch.Tensor]] = {}  # decoded row by row
    decode = adapter.decode

    def observed(state: Any) -> Any:
        latents.setdefault(state.request.request_id, []).append(state.latents)
        return decode(state)

    monkeypatch.setattr(adapter, "decode", observed)
    replies = run_staggered(adapter, requests, **arrivals)
    for request in requests:
        assert replies[request.request_id].wait().num_inference_steps == request.sampling_params.num_inference_steps
    return [torch.cat(latents[request.request_id]) for request in requests]


def tolerance(pipeline: Any, request: OmniDiffusionRequest) -> float:
    # Guidance multiplies rounding errors: at 9.1 and bfloat16, the stock call itself is 0.09 off its float32 result.
    scale = request.sampling_params.true_cfg_scale or 0.0
    return TOLERANCE[pipeline.dtype] * (max(1.0, scale / 5) if pipeline.dtype == torch.bfloat16 else 1.0)


def assert_equal_alone(pipeline: Any, requests: list[OmniDiffusionRequest], results: list[torch.Tensor]) -> None:
    for request, latents in zip(requests, results, strict=True):
        assert difference(latents, alone(pipeline, request)) <= tolerance(pipeline, request)


def difference(one: torch.Tensor, other: torch.Tensor) -> float:
    assert one.shape == other.shape
    assert one.dtype == other.dtype
    return float((one.float() - other.float()).abs().max())


def test_one_request_alone_is_bit_for_bit_the_stock_call(pipeline: Any) -> None:
    for request in requests_for(pipeline, 8):
        latents = fused_latents(adapter_of(pipeline), [request])[0]
        assert torch.equal(latents, stock_call(pipeline, request, request.sampling_params.row_seeds()))


@pytest.mark.parametrize("count", [2, 4, 8])
def test_fused_equals_alone(pipeline: Any, count: int) -> None:
    requests = requests_for(pipeline, count)
    requests[-1] = changed(requests[-1], max_sequence_length=9)  # only cuts the text, so it may differ too
    assert_equal_alone(pipeline, requests, fused_latents(adapter_of(pipeline), requests))


def test_staggered_requests_equal_the_stock_call(pipeline: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    requests = requests_for(pipeline, 8)
    staggered = staggered_latents(adapter_of(pipeline, step_execution=True), requests, monkeypatch)
    assert_equal_alone(pipeline, requests, staggered)


@pytest.mark.parametrize("field", ["prompt", "negative_prompt", "image", "seed", "true_cfg_scale"])
def test_the_comparison_notices_a_mix_up(field: str) -> None:
    # Were a request to get another one's prompt, seed or scale, the tests above would fail: so big is the difference.
    pipeline = qwen_image_edit()
    mine, *others = requests_for(pipeline, 4)
    if field in ("seed", "true_cfg_scale"):
        other = changed(mine, **{field: getattr(others[2].sampling_params, field)})
    else:
        replacement: Any = "low resolution" if field == "negative_prompt" else getattr(others[2], field)
        other = dataclasses.replace(mine, **{field: replacement})
    fused = fused_latents(adapter_of(pipeline), [other, *others])[0]
    assert difference(fused, alone(pipeline, mine)) > 10 * TOLERANCE[torch.float32]


@pytest.mark.parametrize("mine", [0, 4], ids=["short-prompt", "three-images"])
def test_batch_invariant_gives_the_same_bits_whoever_the_neighbours_are(
    pipeline: Any, mine: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(QwenImageAdapter, "text_bucket", 64)  # so that one prompt has a bucket of its own
    adapter = adapter_of(pipeline, batch_invariant=True, step_execution=True)
    others = [
        changed(request, num_inference_steps=2 + number % 2)
        for number, request in enumerate(requests_for(pipeline, 8))
    ]
    request = others.pop(mine)
    bits = fused_latents(adapter, [request])[0]
    for count in range(1, 8):
        for position in sorted({0, count // 2, count}):
            wave = others[:count]
            wave.insert(position, request)
            assert torch.equal(fused_latents(adapter, wave)[position], bits), f"{count} others, position {position}"
    wave = [*others[:4], request, *others[4:]]
    assert torch.equal(staggered_latents(adapter, wave, monkeypatch)[4], bits), "staggered"
    assert_equal_alone(pipeline, [request], [bits])


def test_forward_returns_the_pictures_of_each_request(pipeline: Any) -> None:
    requests = requests_for(pipeline, 3)
    for request, output in zip(requests, adapter_of(pipeline).forward(DiffusionRequestBatch(requests)), strict=True):
        stock = stock_call(pipeline, request, request.sampling_params.row_seeds(), "np")
        assert output.output.shape == stock.shape == (request.sampling_params.num_images_per_prompt, 32, 32, 3)
        assert output.output.dtype == np.uint8
        levels = 1 if pipeline.dtype == torch.float32 else 255 * TOLERANCE[torch.bfloat16]
        assert np.abs(output.output - stock * 255).max() <= levels


def test_padding_is_masked_only_where_texts_have_different_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    pipeline = qwen_image()
    masks: list[torch.Tensor | None] = []
    stock_forward = pipeline.transformer.forward

    def observed(**arguments: Any) -> Any:
        masks.append(arguments.get("encoder_hidden_states_mask"))
        return stock_forward(**arguments)

    monkeypatch.setattr(pipeline.transformer, "forward", observed)
    short, long = (changed(request, num_inference_steps=2) for request in requests_for(pipeline, 2))
    fused_latents(adapter_of(pipeline), [short])
    assert masks == [None] * 4, "the prompt and the negative prompt differ in length, but each has its own pass"
    masks.clear()
    fused_latents(adapter_of(pipeline), [short, long])
    positive, negative, *_ = masks
    assert positive is not None
    assert positive.shape[0] == 3
    assert positive[0].sum() < positive.shape[1] == positive[1].sum() == positive[2].sum()
    assert negative is None, "only one of them has a negative prompt"


def test_guidance_distilled_models_get_the_guidance_scale_of_each_row(monkeypatch: pytest.MonkeyPatch) -> None:
    pipeline = qwen_image(guidance_embeds=True)
    adapter = adapter_of(pipeline)
    guidances: list[list[float]] = []

    def observed(hidden_states: torch.Tensor, guidance: torch.Tensor, **_: Any) -> Any:
        assert guidance.dtype == torch.float32
        guidances.append(guidance.tolist())
        return (hidden_states,)

    # The stock transformer class of diffusers 0.42 cannot be called with guidance at all.
    monkeypatch.setattr(pipeline.transformer, "forward", observed)
    one, two = requests_for(pipeline, 2)
    requests = [changed(one, guidance_scale=3.5), changed(two, guidance_scale=0.5)]
    adapter.denoise_step([adapter.prepare_encode(request) for request in requests])
    assert guidances == [[3.5, 0.5, 0.5], [3.5]]
    with pytest.raises(InvalidRequestError, match="guidance_scale is missing: this model is guidance-distilled"):
        adapter.check_request(one)


def test_a_negative_prompt_of_none_is_no_guidance() -> None:
    pipeline = qwen_image()
    request = dataclasses.replace(requests_for(pipeline, 1)[0], negative_prompt=None)
    assert adapter_of(pipeline).prepare_encode(request).negative_conditioning is None


def test_requests_of_different_sizes_have_different_keys(pipeline: Any) -> None:
    adapter = adapter_of(pipeline)
    first, *others = requests_for(pipeline, 8)
    assert all(adapter.key(other) == adapter.key(first) for other in others)
    # As many image tokens, but at other positions.
    assert adapter.key(changed(first, height=32, width=96)) != adapter.key(changed(first, height=96, width=32))


def test_wide_and_high_pictures_each_equal_the_stock_call(pipeline: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = requests_for(pipeline, 2)
    requests = [changed(one, height=32, width=96), changed(two, height=96, width=32)]
    adapter = adapter_of(pipeline, step_execution=True)
    staggered = staggered_latents(adapter, requests, monkeypatch, arrivals=(0, 0))
    for request, latents in zip(requests, staggered, strict=True):
        assert torch.equal(latents, stock_call(pipeline, request, request.sampling_params.row_seeds()))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"height": 33}, "height=33: must be a multiple of 8; the nearest is 32 or 40"),
        ({"width": 4}, "width=4: must be a multiple of 8; the nearest is 8"),
        ({"max_sequence_length": 1025}, "max_sequence_length=1025: must be at most 1024 for this pipeline"),
        ({"num_inference_steps": 1}, "num_inference_steps=1: must be at least 2"),
        ({"height": 64, "width": 128}, "height=64 width=128: .* at most 4096 .max_pixels"),
    ],
)
@pytest.mark.parametrize("build", [qwen_image, qwen_image_edit])
def test_what_the_pipeline_would_do_wrong_is_refused(build: Any, given: dict[str, int], message: str) -> None:
    pipeline = build()
    adapter = adapter_of(pipeline, max_pixels=64 * 64)
    adapter.check_request(requests_for(pipeline, 1)[0])
    with pytest.raises(FieldValueError, match=message):
        adapter.check_request(changed(requests_for(pipeline, 1)[0], **given))


def test_defaults_are_the_pipelines_own() -> None:
    defaults, edit_defaults = adapter_of(qwen_image()).defaults, adapter_of(qwen_image_edit()).defaults
    assert (defaults.height, defaults.width) == (512, 512)
    assert (edit_defaults.height, edit_defaults.width) == (None, None), "those of the input image"
    for given in (defaults, edit_defaults):
        assert (given.true_cfg_scale, given.num_inference_steps, given.max_sequence_length) == (4.0, 50, 512)


def images_of_two_aspect_ratios(pipeline: Any) -> list[OmniDiffusionRequest]:
    square, wide = (changed(request, num_inference_steps=4) for request in requests_for(pipeline, 2))
    square.image, wide.image = picture(0, 64, 64), picture(1, 40, 120)
    return [square, wide]


@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16"])
def test_each_input_image_keeps_its_own_aspect_ratio(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    pipeline = qwen_image_edit(dtype=dtype)
    adapter = adapter_of(pipeline, step_execution=True)
    requests = images_of_two_aspect_ratios(pipeline)
    square, wide = (dict(adapter.key(request).items) for request in requests)
    assert square == {"height": 32, "width": 32, "image_size": "64x64"}
    assert wide == {"height": 32, "width": 32, "image_size": "96x32"}
    staggered = staggered_latents(adapter, requests, monkeypatch, arrivals=(0, 0))
    for request, latents in zip(requests, staggered, strict=True):
        assert torch.equal(latents, stock_call(pipeline, request, request.sampling_params.row_seeds()))


def test_the_stock_call_gives_all_input_images_the_aspect_ratio_of_the_first() -> None:
    # The reason for the size in the key: were it not there, the second picture would be this wrong one.
    pipeline = qwen_image_edit()
    square, wide = images_of_two_aspect_ratios(pipeline)
    together = pipeline(
        image=[PIL.Image.fromarray(request.image) for request in (square, wide) if request.image is not None],
        prompt=[square.prompt, wide.prompt],
        generator=[torch.Generator().manual_seed(seed) for seed in (0, 10)],
        height=32,
        width=32,
        num_inference_steps=4,
        output_type="latent",
    ).images
    expected = fused_latents(adapter_of(pipeline), [changed(wide, num_images_per_prompt=1)])[0]
    assert difference(together[1:], expected) > 10 * TOLERANCE[torch.float32]


@pytest.mark.parametrize("given", [{}, {"height": 32}, {"width": 64}])
def test_a_picture_without_a_size_has_that_of_its_input_image(given: dict[str, int]) -> None:
    pipeline = qwen_image_edit()
    adapter = adapter_of(pipeline)
    request = changed(images_of_two_aspect_ratios(pipeline)[1], height=None, width=None, num_images_per_prompt=1)
    request = changed(request, **given)
    sized = {"height": 32, "width": 96, **given}
    assert adapter.key(request) == adapter.key(changed(request, **sized))
    output = adapter.forward(DiffusionRequestBatch([request]))[0].output
    assert output.shape == (1, sized["height"], sized["width"], 3)
    assert torch.equal(fused_latents(adapter, [request])[0], alone(pipeline, request))


def test_the_size_of_the_input_image_counts_towards_max_pixels() -> None:
    pipeline = qwen_image_edit()
    request = changed(requests_for(pipeline, 1)[0], height=None, width=128)
    with pytest.raises(FieldValueError, match="height=64 width=128: .* at most 4096 .max_pixels"):
        adapter_of(pipeline, max_pixels=64 * 64).check_request(request)


def test_several_images_of_one_edit_equal_single_calls() -> None:
    pipeline = qwen_image_edit()
    requests = [changed(request, num_images_per_prompt=2) for request in requests_for(pipeline, 2)]
    assert_equal_alone(pipeline, requests, fused_latents(adapter_of(pipeline), requests))


def test_an_edit_needs_an_input_image_that_is_not_too_narrow() -> None:
    pipeline = qwen_image_edit()
    adapter = adapter_of(pipeline)
    request = requests_for(pipeline, 1)[0]
    for image, message in (
        (None, "image is missing: QwenImageEditPipeline needs one"),
        (picture(0, 2, 900), "image is 900 x 2 pixels: the longer side must be at most 200 times the shorter one"),
    ):
        request.image = image
        for method in (adapter.check_request, adapter.key, adapter.prepare_encode):
            with pytest.raises(InvalidRequestError, match=message):
                method(request)
