"""The families of pipelines that are fused: how to build a tiny one, what to ask of it, and its stock call."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import PIL.Image
import torch
from diffusers import (
    DPMSolverMultistepScheduler,
    EulerAncestralDiscreteScheduler,
    StableDiffusion3Img2ImgPipeline,
)
from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit

from tests import tiny_pipelines, tiny_qwen_image, tiny_wan
from tests.example_requests import mixed_requests
from triton_diffusion.adapters.loading import adapter_for
from triton_diffusion.config import EngineConfig
from triton_diffusion.request import OmniDiffusionRequest


@dataclasses.dataclass(frozen=True)
class Family:
    """A family of pipelines.

    Args:
        build: makes a tiny pipeline of the given dtype.
        common: what the requests of one wave have in common.
        guidance: the sampling parameters that take a guidance scale of their own in each request.
        image_sizes: height and width of the input images, where the pipeline is conditioned on one.
        guidance_factor: multiplies the guidance scales.
    """

    name: str
    build: Callable[..., Any]
    common: dict[str, Any]
    guidance: tuple[str, ...] = ("guidance_scale",)
    image_sizes: tuple[tuple[int, int], ...] = ()
    guidance_factor: float = 1.0

    def adapter(self, pipeline: Any, **config: Any) -> Any:
        """The pipeline's adapter, with its final latents kept in `latents` by request id."""
        adapter: Any = adapter_for(pipeline, EngineConfig(model=self.name, **{"max_num_seqs": 8, **config}))
        adapter.latents = {}
        decode = adapter.decode

        def keep_latents(state: Any) -> Any:
            name = state.request.request_id
            parts = [adapter.latents[name], state.latents] if name in adapter.latents else [state.latents]
            adapter.latents[name] = torch.cat(parts)
            return decode(state)

        adapter.decode = keep_latents
        return adapter

    def requests(self, adapter: Any, count: int, **common: Any) -> list[OmniDiffusionRequest]:
        """Requests of one key that differ in everything that may differ."""
        requests = []
        for number, request in enumerate(mixed_requests(count, **{**self.common, **common})):
            given = request.sampling_params.given()
            scale = given.pop("guidance_scale")
            given.update(
                {name: float(scale) * self.guidance_factor + 0.5 * place for place, name in enumerate(self.guidance)}
            )
            if "strength" in adapter.taken:
                given["strength"] = (0.9, 0.6, 0.75)[number % 3]
            params = type(request.sampling_params)(
                **{name: value for name, value in given.items() if name in adapter.taken}  # type: ignore[arg-type]
            ).with_defaults(adapter.defaults)
            image = example_image(number, self.image_sizes) if self.image_sizes else None
            requests.append(dataclasses.replace(request, sampling_params=params, image=image))
        return requests

    def stock_call(self, pipeline: Any, request: OmniDiffusionRequest, output_type: str) -> Any:
        """The stock pipeline's own results for each image of one request alone."""
        given: dict[str, Any] = dict(request.sampling_params.given())
        for name in ("seed", "num_images_per_prompt", "output_format", "lora", "lora_scale"):
            given.pop(name, None)
        if request.negative_prompt is not None:
            given["negative_prompt"] = request.negative_prompt
        if request.image is not None:
            given["image"] = PIL.Image.fromarray(request.image)
        rows = []
        for seed in request.sampling_params.row_seeds():
            generator = torch.Generator().manual_seed(seed)
            with uncached(pipeline):
                result = pipeline(prompt=request.prompt, generator=generator, output_type=output_type, **given)
            rows += list(result[0])
        return torch.stack(rows) if output_type == "latent" else rows


@contextmanager
def uncached(pipeline: Any) -> Iterator[None]:
    """Without the adapter's prompt cache: the stock call is to be a reference of its own."""
    cached = pipeline.encode_prompt
    pipeline.encode_prompt = getattr(cached, "encode_prompt", cached)
    try:
        yield
    finally:
        pipeline.encode_prompt = cached


def example_image(number: int, sizes: tuple[tuple[int, int], ...]) -> np.ndarray[Any, Any]:
    """A picture for each request, of one of the sizes."""
    size = sizes[number % len(sizes)]
    return np.asarray(np.random.default_rng(number).integers(0, 256, [*size, 3], np.uint8))


def stable_diffusion_xl_with(scheduler: Any, **config: Any) -> Callable[..., Any]:
    def build(dtype: torch.dtype = torch.float32) -> Any:
        pipeline = tiny_pipelines.stable_diffusion_xl(dtype=dtype)
        pipeline.scheduler = scheduler.from_config(pipeline.scheduler.config, **config)
        return pipeline

    return build


def stable_diffusion_3_img2img(dtype: torch.dtype = torch.float32) -> Any:
    pipeline = tiny_pipelines.stable_diffusion_3(dtype=dtype)
    img2img = StableDiffusion3Img2ImgPipeline(**pipeline.components)
    img2img.set_progress_bar_config(disable=True)
    return img2img


def qwen_image_edit(dtype: torch.dtype = torch.float32) -> Any:
    # Its stock call makes a megapixel of every input image.
    pipeline_qwenimage_edit.calculate_dimensions = tiny_qwen_image.small_dimensions
    return tiny_qwen_image.qwen_image_edit(dtype=dtype)


SIZE = {"height": 32, "width": 32, "max_sequence_length": 32}

VIDEO = {"height": 16, "width": 16, "num_frames": 5, "max_sequence_length": 32}

FAMILIES = [
    Family("StableDiffusion3", tiny_pipelines.stable_diffusion_3, SIZE),
    Family("StableDiffusion3Img2Img", stable_diffusion_3_img2img, SIZE, image_sizes=((24, 32), (32, 32), (40, 32))),
    Family("Flux", tiny_pipelines.flux, SIZE, guidance=("guidance_scale", "true_cfg_scale")),
    Family("StableDiffusionXL", tiny_pipelines.stable_diffusion_xl, SIZE),
    Family("StableDiffusionXL-EulerAncestral", stable_diffusion_xl_with(EulerAncestralDiscreteScheduler), SIZE),
    Family("StableDiffusionXL-DPMSolver", stable_diffusion_xl_with(DPMSolverMultistepScheduler), SIZE),
    Family("StableDiffusion", tiny_pipelines.stable_diffusion, SIZE),
    Family("QwenImage", tiny_qwen_image.qwen_image, SIZE, guidance=("true_cfg_scale",)),
    Family(
        "QwenImageEdit",
        qwen_image_edit,
        SIZE,
        guidance=("true_cfg_scale",),
        image_sizes=((32, 32), (48, 48), (40, 40)),
        guidance_factor=0.5,  # bfloat16 rounding grows with the scale; the stock call's own is 0.08 at 9
    ),
    Family("Wan2.1", tiny_wan.wan, VIDEO),
    Family("Wan2.2", tiny_wan.wan_2_2, VIDEO, guidance=("guidance_scale", "guidance_scale_2")),
]
BY_NAME = {family.name: family for family in FAMILIES}
