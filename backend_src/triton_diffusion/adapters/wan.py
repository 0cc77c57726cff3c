"""Wan 2.1 and 2.2, text to video: `WanPipeline`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import torch

from triton_diffusion.adapters.adapter import LATENT_SHAPE, PADDED_TEXT, check_most, check_size
from triton_diffusion.adapters.request_state import Evaluation, RequestState
from triton_diffusion.adapters.rows import (
    predicted_by_group,
    repeated,
    row_generators,
    stacked_conditioning,
    stacked_latents,
    stacked_timesteps,
)
from triton_diffusion.adapters.schedulers import own_scheduler
from triton_diffusion.adapters.stepwise import StepwiseAdapter
from triton_diffusion.config import EngineConfig
from triton_diffusion.errors import ConfigurationError, FieldValueError
from triton_diffusion.request import OmniDiffusionRequest
from triton_diffusion.sampling_params import resolved


class WanAdapter(StepwiseAdapter):
    """Guidance, steps, seeds, negative prompts and numbers of videos vary from row to row.

    Wan 2.2 denoises with `transformer` down to the boundary timestep and with `transformer_2` below it; requests on
    both sides share a step, not a forward pass.

    Raises:
        ConfigurationError: the pipeline lacks a transformer that its boundary_ratio calls for.
    """

    key_fields: ClassVar[Mapping[str, str]] = {
        **LATENT_SHAPE,
        "num_frames": LATENT_SHAPE["height"],
        **PADDED_TEXT,
    }
    guides_in_one_pass: ClassVar[bool] = False

    def __init__(self, pipeline: Any, config: EngineConfig) -> None:
        super().__init__(pipeline, config)
        ratio = pipeline.config.boundary_ratio
        for name, is_needed in (
            ("transformer", ratio is None or ratio < 1),
            ("transformer_2", ratio is not None and ratio > 0),
        ):
            if is_needed and getattr(pipeline, name) is None:
                raise ConfigurationError(f"{self.name}: boundary_ratio={ratio} needs {name}, which the model lacks")
        self.boundary_timestep: float | None = (
            None if ratio is None else ratio * pipeline.scheduler.config.num_train_timesteps
        )
        """The timestep below which `transformer_2` takes over; None with one transformer."""
        self.transformer = pipeline.transformer if pipeline.transformer is not None else pipeline.transformer_2
        """The one that says how latents look, as in the stock call; the other one is its like."""

    def check_request(self, request: OmniDiffusionRequest) -> None:
        super().check_request(request)
        pipeline, params = self.pipeline, request.sampling_params
        _, patch_height, patch_width = self.transformer.config.patch_size
        factor = pipeline.vae_scale_factor_spatial
        # The stock call refuses what is no multiple of 16, and rounds down to whole patches without a word.
        check_size(params, math.lcm(16, factor * patch_height, factor * patch_width))
        check_frames(params.num_frames, pipeline.vae_scale_factor_temporal)
        check_most("max_sequence_length", params.max_sequence_length, 512)
        if params.guidance_scale_2 is not None and self.boundary_timestep is None:
            raise FieldValueError(
                f"guidance_scale_2={params.guidance_scale_2}: this model has no second transformer; "
                "leave guidance_scale_2 out"
            )

    @torch.no_grad()
    def prepare_encode(self, request: OmniDiffusionRequest) -> RequestState:
        pipeline, params = self.pipeline, request.sampling_params
        with_guidance = resolved(params.guidance_scale) > 1
        device = pipeline._execution_device

        # 1. Encode the prompts, once for all videos of the request
        generators = row_generators(request)
        positive, negative = pipeline.encode_prompt(
            prompt=request.prompt,
            negative_prompt=request.negative_prompt,
            do_classifier_free_guidance=with_guidance,
            max_sequence_length=params.max_sequence_length,
            device=device,
        )
        dtype = self.transformer.dtype

        # 2. Set the timesteps
        scheduler = own_scheduler(pipeline.scheduler, device, num_inference_steps=params.num_inference_steps)

        # 3. Draw the noise of each row by itself; latents stay float32 between the steps, whatever the model's dtype
        channels = self.transformer.config.in_channels
        size = (params.height, params.width, params.num_frames)
        latents = torch.cat(
            [
                pipeline.prepare_latents(1, channels, *size, torch.float32, device, generator)
                for generator in generators
            ]
        )
        return RequestState(
            request=request,
            scheduler=scheduler,
            latents=latents,
            conditioning={"encoder_hidden_states": repeated(positive.to(dtype), len(generators))},
            negative_conditioning=(
                {"encoder_hidden_states": repeated(negative.to(dtype), len(generators))} if with_guidance else None
            ),
            generators=generators,
        )

    def predict(self, evaluations: Sequence[Evaluation]) -> torch.Tensor:
        """The rows on each side of the boundary in one forward pass of that side's transformer: [all rows, ...]."""
        transformers = [self.transformer_of(evaluation.state) for evaluation in evaluations]
        return predicted_by_group(evaluations, transformers, self.predict_with)

    def predict_with(self, transformer: torch.nn.Module, evaluations: Sequence[Evaluation]) -> torch.Tensor:
        """One transformer's predictions: [all rows, ...]."""
        latents = stacked_latents(evaluations)
        timesteps = stacked_timesteps(evaluations)
        if self.pipeline.config.expand_timesteps:
            # Wan 2.2 TI2V takes a timestep for each token; from text alone they are all the same.
            tokens = latents[0, 0, :, ::2, ::2].numel()
            timesteps = timesteps.float()[:, None].expand(-1, tokens)
        return self.fused_forward(
            transformer,
            evaluations,
            hidden_states=latents.to(self.transformer.dtype),
            timestep=timesteps,
            **stacked_conditioning(evaluations),
        )

    def is_below_boundary(self, state: RequestState) -> bool:
        """Whether the request's next step is one of Wan 2.2's second transformer."""
        return self.boundary_timestep is not None and bool(state.timestep < self.boundary_timestep)

    def transformer_of(self, state: RequestState) -> torch.nn.Module:
        """The transformer of the request's next step."""
        pipeline = self.pipeline
        transformer: torch.nn.Module = (
            pipeline.transformer_2 if self.is_below_boundary(state) else pipeline.transformer
        )
        return transformer

    def guidance_scale(self, state: RequestState) -> float:
        second = state.request.sampling_params.guidance_scale_2
        if second is not None and self.is_below_boundary(state):
            return second
        return super().guidance_scale(state)

    def postprocess(self, pixels: torch.Tensor) -> np.ndarray[Any, Any]:
        """[rows, F, H, W, 3]"""
        videos: np.ndarray[Any, Any] = self.pipeline.video_processor.postprocess_video(pixels, output_type="np")
        return videos

    def decode_rows(self, state: RequestState, latents: torch.Tensor) -> torch.Tensor:
        """The decoder's output for some rows: [rows, 3, F, H, W]."""
        vae = self.pipeline.vae
        latents = latents.to(vae.dtype)
        mean = torch.tensor(vae.config.latents_mean).view(1, -1, 1, 1, 1).to(latents)
        deviation = torch.tensor(vae.config.latents_std).view(1, -1, 1, 1, 1).to(latents)
        # Divided by the reciprocal, as the stock call does: in bfloat16 a product rounds differently.
        pixels: torch.Tensor = vae.decode(latents / (1.0 / deviation) + mean, return_dict=False)[0]
        return pixels


def check_frames(num_frames: int | None, factor: int) -> None:
    """
    Args:
        factor: frames that the autoencoder makes of one latent frame, except of the first, which is one frame.

    Raises:
        FieldValueError: the autoencoder makes no video of so many frames; names the nearest numbers that are right.
    """
    if num_frames is not None and (rest := (num_frames - 1) % factor):
        below = num_frames - rest
        nearest = f"{below} or {below + factor}"
        raise FieldValueError(
            f"num_frames={num_frames}: must be a multiple of {factor} plus 1; the nearest is {nearest}"
        )
