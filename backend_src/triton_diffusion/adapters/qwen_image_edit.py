"""Qwen-Image-Edit: `QwenImageEditPipeline`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import PIL.Image
import torch
from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit

from triton_diffusion.adapters.adapter import required_image
from triton_diffusion.adapters.qwen_image import QwenImageAdapter
from triton_diffusion.adapters.request_state import Evaluation, RequestState
from triton_diffusion.adapters.rows import repeated
from triton_diffusion.errors import FieldValueError
from triton_diffusion.request import OmniDiffusionRequest
from triton_diffusion.sampling_params import SamplingParams
from triton_diffusion.sampling_params_key import STRICT_FIELDS, SamplingParamsKey

LARGEST_ASPECT_RATIO = 200
"""Of a picture that the Qwen2-VL image processor takes."""


class QwenImageEditAdapter(QwenImageAdapter):
    """Each request has an input image of its own, which keeps its own aspect ratio.

    The key holds the size that it is resized to as well.
    """

    key_fields: ClassVar[Mapping[str, str]] = {
        **QwenImageAdapter.key_fields,
        "image_size": "the tokens of the resized input image follow those of the latents",
    }

    def complete(self, defaults: SamplingParams) -> SamplingParams:
        return defaults  # the size of the input image

    def key(self, request: OmniDiffusionRequest) -> SamplingParamsKey:
        width, height = self.image_size(request)
        fields = STRICT_FIELDS if self.config.strict_batch_key else QwenImageAdapter.key_fields
        key = SamplingParamsKey.of(self._sized(request).sampling_params, fields)
        return key.extended(image_size=f"{width}x{height}")

    def check_request(self, request: OmniDiffusionRequest) -> None:
        super().check_request(self._sized(request))

    @torch.no_grad()
    def prepare_encode(self, request: OmniDiffusionRequest) -> RequestState:
        state = super().prepare_encode(self._sized(request))
        image_latents = repeated(self._image_latents(state), state.num_rows)
        state.conditioning["image_latents"] = image_latents
        if state.negative_conditioning is not None:
            state.negative_conditioning["image_latents"] = image_latents
        return state

    def encoder_inputs(self, request: OmniDiffusionRequest) -> dict[str, Any]:
        return {"image": self._resized(request)}

    def draw_noise(self, params: SamplingParams, dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
        noise: torch.Tensor = self.pipeline.prepare_latents(
            image=None, batch_size=1, dtype=dtype, generator=generator, **self.latents_arguments(params)
        )[0]
        return noise

    def predict(self, evaluations: Sequence[Evaluation]) -> torch.Tensor:
        # The model predicts noise for the tokens of the input image too.
        return super().predict(evaluations)[:, : evaluations[0].state.latents.shape[1]]

    def model_arguments(self, evaluations: Sequence[Evaluation]) -> dict[str, Any]:
        arguments = super().model_arguments(evaluations)
        images = arguments.pop("image_latents")
        return {**arguments, "hidden_states": torch.cat([arguments["hidden_states"], images], dim=1)}

    def image_shapes(self, request: OmniDiffusionRequest) -> list[tuple[int, int, int]]:
        width, height = self.image_size(request)
        return [*super().image_shapes(request), self.image_shape(height, width)]

    def image_size(self, request: OmniDiffusionRequest) -> tuple[int, int]:
        """The width and height that the input image is resized to, as the stock call computes them.

        Raises:
            InvalidRequestError: there is no input image, or it is too narrow.
        """
        image = required_image(request, self.name)
        height, width = image.shape[:2]
        resized: tuple[int, int, None] = pipeline_qwenimage_edit.calculate_dimensions(1024 * 1024, width / height)
        if max(resized[:2]) > LARGEST_ASPECT_RATIO * min(resized[:2]):
            raise FieldValueError(
                f"image is {width} x {height} pixels: the longer side must be at most {LARGEST_ASPECT_RATIO} times "
                "the shorter one"
            )
        return resized[:2]

    def _sized(self, request: OmniDiffusionRequest) -> OmniDiffusionRequest:
        """The request with a height and width: those of its resized input image where it gives none."""
        width, height = self.image_size(request)
        params = request.sampling_params
        params = dataclasses.replace(params, height=params.height or height, width=params.width or width)
        return dataclasses.replace(request, sampling_params=params)

    def _resized(self, request: OmniDiffusionRequest) -> PIL.Image.Image:
        width, height = self.image_size(request)
        image = PIL.Image.fromarray(required_image(request, self.name))
        resized: PIL.Image.Image = self.pipeline.image_processor.resize(image, height, width)
        return resized

    def _image_latents(self, state: RequestState) -> torch.Tensor:
        """The input image as the model sees it: [1, image tokens, channels]."""
        pixels = self.pipeline.image_processor.preprocess(self._resized(state.request)).unsqueeze(2)
        latents: torch.Tensor = self.pipeline.prepare_latents(
            image=pixels,
            batch_size=1,
            dtype=state.latents.dtype,
            generator=None,
            latents=state.latents[:1],  # so that no noise is drawn
            **self.latents_arguments(state.request.sampling_params),
        )[1]
        return latents
