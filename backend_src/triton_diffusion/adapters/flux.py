"""Flux.1: `FluxPipeline`, with distilled guidance and with true classifier-free guidance."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import ClassVar

import numpy as np
import torch

from triton_diffusion.adapters.adapter import LATENT_SHAPE, PADDED_TEXT, check_most, check_size
from triton_diffusion.adapters.request_state import Conditioning, Evaluation, RequestState
from triton_diffusion.adapters.rows import (
    repeated_conditioning,
    row_generators,
    stacked_conditioning,
    stacked_latents,
    stacked_timesteps,
)
from triton_diffusion.adapters.schedulers import dynamic_shift, own_scheduler
from triton_diffusion.adapters.stepwise import StepwiseAdapter
from triton_diffusion.request import OmniDiffusionRequest
from triton_diffusion.sampling_params import SamplingParams, resolved


class FluxAdapter(StepwiseAdapter):
    """Both kinds of guidance vary from row to row."""

    key_fields: ClassVar[Mapping[str, str]] = {**LATENT_SHAPE, **PADDED_TEXT}
    guides_in_one_pass: ClassVar[bool] = False
    guidance_field: ClassVar[str] = "true_cfg_scale"

    def complete(self, defaults: SamplingParams) -> SamplingParams:
        size = self.pipeline.default_sample_size * self.pipeline.vae_scale_factor
        return dataclasses.replace(defaults, height=size, width=size)

    def check_request(self, request: OmniDiffusionRequest) -> None:
        super().check_request(request)
        check_size(request.sampling_params, 2 * self.pipeline.vae_scale_factor)
        check_most("max_sequence_length", request.sampling_params.max_sequence_length, 512)

    @torch.no_grad()
    def prepare_encode(self, request: OmniDiffusionRequest) -> RequestState:
        pipeline, params = self.pipeline, request.sampling_params
        device = pipeline._execution_device
        generators = row_generators(request)

        # 1. Encode the prompts
        conditioning = self._encode(request.prompt, params, len(generators))
        negative_conditioning = None
        if resolved(params.true_cfg_scale) > 1 and request.negative_prompt is not None:
            negative_conditioning = self._encode(request.negative_prompt, params, len(generators))

        # 2. Draw the noise of each row by itself; the latents are packed: [rows, image tokens, 4 C]
        channels = pipeline.transformer.config.in_channels // 4
        dtype = conditioning["encoder_hidden_states"].dtype
        noise = [
            pipeline.prepare_latents(1, channels, params.height, params.width, dtype, device, generator)[0]
            for generator in generators
        ]

        # 3. Set the timesteps
        steps = resolved(params.num_inference_steps)
        own_sigmas = getattr(pipeline.scheduler.config, "use_flow_sigmas", False)
        scheduler = own_scheduler(
            pipeline.scheduler,
            device,
            **({"num_inference_steps": steps} if own_sigmas else {"sigmas": np.linspace(1.0, 1 / steps, steps)}),
            **dynamic_shift(pipeline.scheduler, noise[0].shape[1], max_shift=1.15),
        )
        return RequestState(
            request=request,
            scheduler=scheduler,
            latents=torch.cat(noise),
            conditioning=conditioning,
            negative_conditioning=negative_conditioning,
            generators=generators,
        )

    def predict(self, evaluations: Sequence[Evaluation]) -> torch.Tensor:
        pipeline, params = self.pipeline, evaluations[0].state.request.sampling_params
        conditioning = stacked_conditioning(evaluations)
        latents = stacked_latents(evaluations)
        # Positions, the same for all rows of a key.
        token = 2 * pipeline.vae_scale_factor
        grid = (resolved(params.height) // token, resolved(params.width) // token)
        text_tokens = conditioning["encoder_hidden_states"].shape[1]
        positions = {
            "img_ids": pipeline._prepare_latent_image_ids(1, *grid, latents.device, latents.dtype),
            "txt_ids": torch.zeros(text_tokens, 3, device=latents.device, dtype=latents.dtype),
        }
        return self.fused_forward(
            pipeline.transformer,
            evaluations,
            shared=positions,
            hidden_states=latents,
            timestep=stacked_timesteps(evaluations).to(latents.dtype) / 1000,
            **conditioning,
        )

    def decode_rows(self, state: RequestState, latents: torch.Tensor) -> torch.Tensor:
        params = state.request.sampling_params
        unpacked = self.pipeline._unpack_latents(latents, params.height, params.width, self.pipeline.vae_scale_factor)
        return super().decode_rows(state, unpacked)

    def _encode(self, prompt: str, params: SamplingParams, rows: int) -> Conditioning:
        embeds, pooled, _ = self.pipeline.encode_prompt(
            prompt=prompt,
            prompt_2=None,
            device=self.pipeline._execution_device,
            max_sequence_length=params.max_sequence_length,
        )
        conditioning = {"encoder_hidden_states": embeds, "pooled_projections": pooled}
        if self.pipeline.transformer.config.guidance_embeds:
            scale = torch.full([1], resolved(params.guidance_scale), device=embeds.device, dtype=torch.float32)
            conditioning["guidance"] = scale
        return repeated_conditioning(conditioning, rows)
