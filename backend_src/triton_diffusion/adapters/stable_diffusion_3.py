"""Stable Diffusion 3 and 3.5: `StableDiffusion3Pipeline`, `StableDiffusion3Img2ImgPipeline`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import PIL.Image
import torch

from triton_diffusion.adapters.adapter import LATENT_SHAPE, PADDED_TEXT, check_most, check_size, required_image
from triton_diffusion.adapters.request_state import Conditioning, Evaluation, RequestState
from triton_diffusion.adapters.rows import (
    repeated_conditioning,
    row_generators,
    stacked_conditioning,
    stacked_latents,
    stacked_timesteps,
)
from triton_diffusion.adapters.schedulers import dynamic_shift, own_scheduler, using_scheduler
from triton_diffusion.adapters.stepwise import StepwiseAdapter
from triton_diffusion.errors import FieldValueError
from triton_diffusion.request import OmniDiffusionRequest
from triton_diffusion.sampling_params import SamplingParams, resolved


class StableDiffusion3Adapter(StepwiseAdapter):
    """Guidance, steps, seeds, negative prompts and numbers of images vary from row to row."""

    key_fields: ClassVar[Mapping[str, str]] = {**LATENT_SHAPE, **PADDED_TEXT}

    def complete(self, defaults: SamplingParams) -> SamplingParams:
        size = self.pipeline.default_sample_size * self.pipeline.vae_scale_factor
        return dataclasses.replace(defaults, height=size, width=size)

    def check_request(self, request: OmniDiffusionRequest) -> None:
        super().check_request(request)
        multiple = self.pipeline.vae_scale_factor * self.pipeline.patch_size
        largest = multiple * self.pipeline.transformer.config.pos_embed_max_size
        check_size(request.sampling_params, multiple, largest)
        check_most("max_sequence_length", request.sampling_params.max_sequence_length, 512)

    @torch.no_grad()
    def prepare_encode(self, request: OmniDiffusionRequest) -> RequestState:
        generators = row_generators(request)

        # 1. Encode the prompts, once for all images of the request
        conditioning, negative_conditioning = self._encode(request, len(generators))
        dtype = conditioning["encoder_hidden_states"].dtype

        # 2. Set the timesteps
        scheduler = self._own_scheduler(request.sampling_params)
        first_step = self.first_step(request.sampling_params, scheduler)

        # 3. Draw the noise of each row by itself
        latents = [self.row_latents(request, scheduler, first_step, dtype, generator) for generator in generators]
        return RequestState(
            request=request,
            scheduler=scheduler,
            latents=torch.cat(latents),
            conditioning=conditioning,
            negative_conditioning=negative_conditioning,
            generators=generators,
            first_step=first_step,
        )

    def predict(self, evaluations: Sequence[Evaluation]) -> torch.Tensor:
        return self.fused_forward(
            self.pipeline.transformer,
            evaluations,
            hidden_states=stacked_latents(evaluations),
            timestep=stacked_timesteps(evaluations),
            **stacked_conditioning(evaluations),
        )

    def first_step(self, params: SamplingParams, scheduler: Any) -> int:
        """The first of the scheduler's timesteps that the request takes."""
        return 0

    def row_latents(
        self,
        request: OmniDiffusionRequest,
        scheduler: Any,
        first_step: int,
        dtype: torch.dtype,
        generator: torch.Generator,
    ) -> torch.Tensor:
        """The latents that a row begins with: [1, C, H / 8, W / 8] (or the scale of another autoencoder)."""
        pipeline, params = self.pipeline, request.sampling_params
        channels = pipeline.transformer.config.in_channels
        device = pipeline._execution_device
        latents: torch.Tensor = pipeline.prepare_latents(
            1, channels, params.height, params.width, dtype, device, generator
        )
        return latents

    def _encode(self, request: OmniDiffusionRequest, rows: int) -> tuple[Conditioning, Conditioning | None]:
        with_guidance = resolved(request.sampling_params.guidance_scale) > 1
        positive, negative, positive_pooled, negative_pooled = self.pipeline.encode_prompt(
            prompt=request.prompt,
            prompt_2=None,
            prompt_3=None,
            negative_prompt=request.negative_prompt,
            do_classifier_free_guidance=with_guidance,
            max_sequence_length=request.sampling_params.max_sequence_length,
            device=self.pipeline._execution_device,
        )
        conditioning = {"encoder_hidden_states": positive, "pooled_projections": positive_pooled}
        if not with_guidance:
            return repeated_conditioning(conditioning, rows), None
        negative_conditioning = {"encoder_hidden_states": negative, "pooled_projections": negative_pooled}
        return repeated_conditioning(conditioning, rows), repeated_conditioning(negative_conditioning, rows)

    def _own_scheduler(self, params: SamplingParams) -> Any:
        token = self.pipeline.vae_scale_factor * self.pipeline.transformer.config.patch_size
        image_tokens = (resolved(params.height) // token) * (resolved(params.width) // token)
        return own_scheduler(
            self.pipeline.scheduler,
            self.pipeline._execution_device,
            num_inference_steps=params.num_inference_steps,
            **dynamic_shift(self.pipeline.scheduler, image_tokens, max_shift=1.16),
        )


class StableDiffusion3Img2ImgAdapter(StableDiffusion3Adapter):
    """Image and strength vary from row to row too: an image is resized to the key's height and width."""

    def check_request(self, request: OmniDiffusionRequest) -> None:
        super().check_request(request)
        required_image(request, self.name)
        params = request.sampling_params
        steps, strength = resolved(params.num_inference_steps), resolved(params.strength)
        if int(max(steps - min(steps * strength, steps), 0)) >= steps:
            raise FieldValueError(f"strength={strength}: leaves none of {steps} steps; must be at least {1 / steps:g}")

    def first_step(self, params: SamplingParams, scheduler: Any) -> int:
        with using_scheduler(self.pipeline, scheduler):
            timesteps, _ = self.pipeline.get_timesteps(
                params.num_inference_steps, params.strength, self.pipeline._execution_device
            )
        return len(scheduler.timesteps) - len(timesteps)

    def row_latents(
        self,
        request: OmniDiffusionRequest,
        scheduler: Any,
        first_step: int,
        dtype: torch.dtype,
        generator: torch.Generator,
    ) -> torch.Tensor:
        pipeline, params = self.pipeline, request.sampling_params
        image = pipeline.image_processor.preprocess(
            PIL.Image.fromarray(required_image(request, self.name)), height=params.height, width=params.width
        )
        timestep = scheduler.timesteps[first_step : first_step + 1]
        with using_scheduler(pipeline, scheduler):
            latents: torch.Tensor = pipeline.prepare_latents(
                image, timestep, 1, 1, dtype, pipeline._execution_device, generator
            )
        return latents
