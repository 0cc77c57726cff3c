"""Stable Diffusion 3 and 3.5: `StableDiffusion3Pipeline`."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import ClassVar

import torch

from triton_diffusion.adapters.adapter import check_most, check_size
from triton_diffusion.adapters.stepwise import (
    Evaluation,
    RequestState,
    StepwiseAdapter,
    dynamic_shift,
    own_scheduler,
    row_generators,
    stacked_conditioning,
    stacked_latents,
    stacked_timesteps,
)
from triton_diffusion.request import OmniDiffusionRequest
from triton_diffusion.sampling_params import SamplingParams, resolved


class StableDiffusion3Adapter(StepwiseAdapter):
    """Guidance, steps, seeds, negative prompts and numbers of images vary from row to row."""

    # The text is padded to max_sequence_length and the padding is attended to, so it changes the picture.
    key_fields: ClassVar[tuple[str, ...]] = ("height", "width", "max_sequence_length")

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
        pipeline, params = self.pipeline, request.sampling_params
        with_guidance = resolved(params.guidance_scale) > 1
        device = pipeline._execution_device

        # 1. Encode the prompts, once for all images of the request
        generators = row_generators(request)
        positive, negative, positive_pooled, negative_pooled = pipeline.encode_prompt(
            prompt=request.prompt,
            prompt_2=None,
            prompt_3=None,
            negative_prompt=request.negative_prompt,
            do_classifier_free_guidance=with_guidance,
            num_images_per_prompt=len(generators),
            max_sequence_length=params.max_sequence_length,
            device=device,
        )

        # 2. Draw the noise of each row by itself
        channels = pipeline.transformer.config.in_channels
        latents = torch.cat(
            [
                pipeline.prepare_latents(1, channels, params.height, params.width, positive.dtype, device, generator)
                for generator in generators
            ]
        )

        # 3. Set the timesteps
        patch_size = pipeline.transformer.config.patch_size
        image_tokens = (latents.shape[2] // patch_size) * (latents.shape[3] // patch_size)
        scheduler = own_scheduler(
            pipeline.scheduler,
            device,
            num_inference_steps=params.num_inference_steps,
            **dynamic_shift(pipeline.scheduler, image_tokens, max_shift=1.16),
        )
        negative_conditioning = {"encoder_hidden_states": negative, "pooled_projections": negative_pooled}
        return RequestState(
            request=request,
            scheduler=scheduler,
            latents=latents,
            conditioning={"encoder_hidden_states": positive, "pooled_projections": positive_pooled},
            negative_conditioning=negative_conditioning if with_guidance else None,
        )

    def predict(self, evaluations: Sequence[Evaluation]) -> torch.Tensor:
        return self.fused_forward(
            self.pipeline.transformer,
            hidden_states=stacked_latents(evaluations),
            timestep=stacked_timesteps(evaluations),
            **stacked_conditioning(evaluations),
        )
