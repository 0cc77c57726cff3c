"""The families with a U-Net: `StableDiffusionPipeline` (1.x, 2.x) and `StableDiffusionXLPipeline`."""

from __future__ import annotations

import dataclasses
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import torch

from triton_diffusion.adapters.adapter import LATENT_SHAPE, check_size
from triton_diffusion.adapters.request_state import Conditioning, Evaluation, RequestState
from triton_diffusion.adapters.rows import (
    repeated,
    repeated_conditioning,
    row_generators,
    stacked_conditioning,
    stacked_timesteps,
)
from triton_diffusion.adapters.schedulers import own_scheduler, takes_argument, using_scheduler
from triton_diffusion.adapters.stepwise import StepwiseAdapter
from triton_diffusion.request import OmniDiffusionRequest
from triton_diffusion.sampling_params import SamplingParams, resolved


class UNetAdapter(StepwiseAdapter):
    """Guidance, steps, seeds, negative prompts and numbers of images vary from row to row, with any scheduler."""

    key_fields: ClassVar[Mapping[str, str]] = LATENT_SHAPE

    def check_request(self, request: OmniDiffusionRequest) -> None:
        super().check_request(request)
        check_size(request.sampling_params, 8)

    @torch.no_grad()
    def prepare_encode(self, request: OmniDiffusionRequest) -> RequestState:
        pipeline, params = self.pipeline, request.sampling_params
        device = pipeline._execution_device
        generators = row_generators(request)

        # 1. Encode the prompts, once for all images of the request
        with_guidance = resolved(params.guidance_scale) > 1 and not self._takes_guidance_as_input
        conditioning, negative_conditioning = self.encode(request, len(generators), with_guidance)
        dtype = conditioning["encoder_hidden_states"].dtype
        if self._takes_guidance_as_input:
            conditioning["timestep_cond"] = self._guidance_embedding(params, len(generators), dtype)

        # 2. Set the timesteps
        scheduler = own_scheduler(pipeline.scheduler, device, num_inference_steps=params.num_inference_steps)

        # 3. Draw the noise of each row by itself, as strong as the scheduler wants it
        channels = pipeline.unet.config.in_channels
        with using_scheduler(pipeline, scheduler):
            latents = [
                pipeline.prepare_latents(1, channels, params.height, params.width, dtype, device, generator)
                for generator in generators
            ]
        return RequestState(
            request=request,
            scheduler=scheduler,
            latents=torch.cat(latents),
            conditioning=conditioning,
            negative_conditioning=negative_conditioning,
            generators=generators,
        )

    @abstractmethod
    def encode(
        self, request: OmniDiffusionRequest, rows: int, with_guidance: bool
    ) -> tuple[Conditioning, Conditioning | None]:
        """The conditioning of the prompt, and of the negative prompt."""

    def predict(self, evaluations: Sequence[Evaluation]) -> torch.Tensor:
        samples = [
            evaluation.state.scheduler.scale_model_input(evaluation.state.latents, evaluation.state.timestep)
            for evaluation in evaluations
        ]
        return self.fused_forward(
            self.pipeline.unet,
            evaluations,
            sample=torch.cat(samples),
            timestep=stacked_timesteps(evaluations),
            **self.unet_arguments(stacked_conditioning(evaluations)),
        )

    def unet_arguments(self, conditioning: Conditioning) -> dict[str, Any]:
        """The conditioning as arguments of the U-Net."""
        return dict(conditioning)

    def scheduler_arguments(self, state: RequestState) -> dict[str, Any]:
        arguments: dict[str, Any] = {"generator": state.generators, "eta": 0.0}
        return {name: value for name, value in arguments.items() if takes_argument(state.scheduler.step, name)}

    @property
    def _takes_guidance_as_input(self) -> bool:
        """Distilled models (LCM) are conditioned on the guidance scale instead of being guided."""
        return self.pipeline.unet.config.time_cond_proj_dim is not None

    def _guidance_embedding(self, params: SamplingParams, rows: int, dtype: torch.dtype) -> torch.Tensor:
        scale = torch.tensor(resolved(params.guidance_scale) - 1).repeat(rows)
        embedding: torch.Tensor = self.pipeline.get_guidance_scale_embedding(
            scale, embedding_dim=self.pipeline.unet.config.time_cond_proj_dim
        )
        return embedding.to(device=self.pipeline._execution_device, dtype=dtype)


class StableDiffusionAdapter(UNetAdapter):
    """Stable Diffusion 1.x and 2.x, with its safety checker where the checkpoint has one."""

    def complete(self, defaults: SamplingParams) -> SamplingParams:
        sample_size = self.pipeline.unet.config.sample_size
        height, width = (sample_size, sample_size) if isinstance(sample_size, int) else sample_size
        scale = self.pipeline.vae_scale_factor
        return dataclasses.replace(defaults, height=height * scale, width=width * scale)

    def encode(
        self, request: OmniDiffusionRequest, rows: int, with_guidance: bool
    ) -> tuple[Conditioning, Conditioning | None]:
        positive, negative = self.pipeline.encode_prompt(
            request.prompt, self.pipeline._execution_device, 1, with_guidance, request.negative_prompt
        )
        return (
            {"encoder_hidden_states": repeated(positive, rows)},
            {"encoder_hidden_states": repeated(negative, rows)} if with_guidance else None,
        )

    def postprocess(self, pixels: torch.Tensor) -> np.ndarray[Any, Any]:
        checked, is_unsafe = self.pipeline.run_safety_checker(pixels, pixels.device, self.pipeline.unet.dtype)
        do_denormalize = [True] * len(pixels) if is_unsafe is None else [not unsafe for unsafe in is_unsafe]
        processed: np.ndarray[Any, Any] = self.pipeline.image_processor.postprocess(
            checked, output_type="np", do_denormalize=do_denormalize
        )
        return processed


class StableDiffusionXLAdapter(UNetAdapter):
    """Stable Diffusion XL; each row has its own size conditioning."""

    def __init__(self, pipeline: Any, config: Any) -> None:
        super().__init__(pipeline, config)
        if pipeline.vae.dtype == torch.float16 and pipeline.vae.config.force_upcast:
            pipeline.upcast_vae()  # it overflows in float16; the stock call does so at every decode

    def complete(self, defaults: SamplingParams) -> SamplingParams:
        size = self.pipeline.default_sample_size * self.pipeline.vae_scale_factor
        return dataclasses.replace(defaults, height=size, width=size)

    def encode(
        self, request: OmniDiffusionRequest, rows: int, with_guidance: bool
    ) -> tuple[Conditioning, Conditioning | None]:
        pipeline, params = self.pipeline, request.sampling_params
        positive, negative, positive_pooled, negative_pooled = pipeline.encode_prompt(
            prompt=request.prompt,
            device=pipeline._execution_device,
            num_images_per_prompt=1,
            do_classifier_free_guidance=with_guidance,
            negative_prompt=request.negative_prompt,
        )
        size = (resolved(params.height), resolved(params.width))
        projection = pipeline.text_encoder_2.config.projection_dim
        time_ids = pipeline._get_add_time_ids(
            size, (0, 0), size, dtype=positive.dtype, text_encoder_projection_dim=projection
        )
        time_ids = time_ids.to(positive.device)
        conditioning = {"encoder_hidden_states": positive, "text_embeds": positive_pooled, "time_ids": time_ids}
        if not with_guidance:
            return repeated_conditioning(conditioning, rows), None
        negative_conditioning = {
            "encoder_hidden_states": negative,
            "text_embeds": negative_pooled,
            "time_ids": time_ids,
        }
        return repeated_conditioning(conditioning, rows), repeated_conditioning(negative_conditioning, rows)

    def unet_arguments(self, conditioning: Conditioning) -> dict[str, Any]:
        arguments: dict[str, Any] = dict(conditioning)
        arguments["added_cond_kwargs"] = {name: arguments.pop(name) for name in ("text_embeds", "time_ids")}
        return arguments

    def decode_rows(self, state: RequestState, latents: torch.Tensor) -> torch.Tensor:
        vae, watermark = self.pipeline.vae, getattr(self.pipeline, "watermark", None)
        mean, std = getattr(vae.config, "latents_mean", None), getattr(vae.config, "latents_std", None)
        if mean is not None and std is not None:
            mean, std = (
                torch.tensor(value).view(1, 4, 1, 1).to(latents.device, latents.dtype) for value in (mean, std)
            )
            latents = latents * std / vae.config.scaling_factor + mean
        else:
            latents = latents / vae.config.scaling_factor
        pixels: torch.Tensor = vae.decode(latents.to(vae.dtype), return_dict=False)[0]
        if watermark is not None:
            pixels = watermark.apply_watermark(pixels)
        return pixels
