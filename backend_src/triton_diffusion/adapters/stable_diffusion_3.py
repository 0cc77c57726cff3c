"""Stable Diffusion 3 and 3.5: `StableDiffusion3Pipeline`."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from diffusers.pipelines.stable_diffusion_3.pipeline_stable_diffusion_3 import calculate_shift

from triton_diffusion.adapters.adapter import to_uint8
from triton_diffusion.adapters.stepwise import (
    RequestState,
    StepwiseAdapter,
    classifier_free_guidance,
    own_scheduler,
    row_generators,
)
from triton_diffusion.collate import collate
from triton_diffusion.errors import FieldValueError
from triton_diffusion.request import OmniDiffusionRequest
from triton_diffusion.sampling_params import SamplingParams


class StableDiffusion3Adapter(StepwiseAdapter):
    """Guidance, steps, seeds, negative prompts and numbers of images vary from row to row."""

    # The text is padded to max_sequence_length and the padding is attended to, so it changes the picture.
    key_fields: ClassVar[tuple[str, ...]] = ("height", "width", "max_sequence_length")

    def complete(self, defaults: SamplingParams) -> SamplingParams:
        size = self.pipeline.default_sample_size * self.pipeline.vae_scale_factor
        return dataclasses.replace(defaults, height=size, width=size)

    def check_request(self, request: OmniDiffusionRequest) -> None:
        super().check_request(request)
        params = request.sampling_params
        assert params.height is not None
        assert params.width is not None
        assert params.max_sequence_length is not None
        multiple = self.pipeline.vae_scale_factor * self.pipeline.patch_size
        largest = multiple * self.pipeline.transformer.config.pos_embed_max_size
        for name, size in (("height", params.height), ("width", params.width)):
            if size % multiple:
                below, above = size - size % multiple, size - size % multiple + multiple
                nearest = f"{below} or {above}" if below else f"{above}"
                raise FieldValueError(f"{name}={size}: must be a multiple of {multiple}; the nearest is {nearest}")
            if size > largest:
                raise FieldValueError(f"{name}={size}: this model makes pictures of at most {largest} pixels a side")
        if params.max_sequence_length > 512:
            raise FieldValueError(f"max_sequence_length={params.max_sequence_length}: must be at most 512")

    @torch.no_grad()
    def prepare_encode(self, request: OmniDiffusionRequest) -> RequestState:
        pipeline, params = self.pipeline, request.sampling_params
        assert params.guidance_scale is not None
        assert params.num_inference_steps is not None
        device = pipeline._execution_device

        # 1. Encode the prompts, once for all images of the request
        generators = row_generators(request)
        positive, negative, positive_pooled, negative_pooled = pipeline.encode_prompt(
            prompt=request.prompt,
            prompt_2=None,
            prompt_3=None,
            negative_prompt=request.negative_prompt,
            do_classifier_free_guidance=params.guidance_scale > 1,
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
        scheduler = own_scheduler(
            pipeline.scheduler, params.num_inference_steps, device, **self._shift(pipeline.scheduler, latents)
        )
        return RequestState(
            request=request,
            scheduler=scheduler,
            timesteps=scheduler.timesteps,
            latents=latents,
            conditioning={"encoder_hidden_states": positive, "pooled_projections": positive_pooled},
            negative_conditioning=(
                {"encoder_hidden_states": negative, "pooled_projections": negative_pooled}
                if params.guidance_scale > 1
                else None
            ),
        )

    @torch.no_grad()
    def denoise_step(self, states: Sequence[RequestState]) -> list[torch.Tensor]:
        # The negative evaluations of the rows with guidance come first, as in the stock call, then all positive ones.
        guided = [state for state in states if state.negative_conditioning is not None]
        evaluated = [*guided, *states]
        conditionings = [state.negative_conditioning or {} for state in guided]
        conditionings += [state.conditioning for state in states]
        prediction = self.fused_forward(
            self.pipeline.transformer,
            hidden_states=_stacked("latents", [state.latents for state in evaluated]),
            timestep=torch.cat([state.timestep.expand(state.num_rows) for state in evaluated]),
            **{
                name: _stacked(name, [conditioning[name] for conditioning in conditionings])
                for name in states[0].conditioning
            },
        )
        parts = torch.split(prediction, [state.num_rows for state in evaluated])
        negatives = dict(zip(map(id, guided), parts[: len(guided)], strict=True))
        return [
            classifier_free_guidance(negatives[id(state)], part, _guidance_scale(state))
            if id(state) in negatives
            else part
            for state, part in zip(states, parts[len(guided) :], strict=True)
        ]

    @torch.no_grad()
    def decode(self, state: RequestState) -> Any:
        vae = self.pipeline.vae
        latents = state.latents / vae.config.scaling_factor + vae.config.shift_factor
        # Row by row: bounded memory, and the same bits as decoding the row alone.
        pixels = torch.cat([vae.decode(row, return_dict=False)[0] for row in latents.split(1)])
        return to_uint8(self.pipeline.image_processor.postprocess(pixels, output_type="np"))

    def _shift(self, scheduler: Any, latents: torch.Tensor) -> dict[str, float]:
        """The resolution-dependent shift of the timesteps, from this request's own number of image tokens."""
        config = scheduler.config
        if not config.get("use_dynamic_shifting"):
            return {}
        patch_size = self.pipeline.transformer.config.patch_size
        image_tokens = (latents.shape[2] // patch_size) * (latents.shape[3] // patch_size)
        shift = calculate_shift(
            image_tokens,
            config.get("base_image_seq_len", 256),
            config.get("max_image_seq_len", 4096),
            config.get("base_shift", 0.5),
            config.get("max_shift", 1.16),
        )
        return {"mu": shift}


def _stacked(name: str, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    stacked = collate(name, tensors)
    assert stacked is not None
    return stacked


def _guidance_scale(state: RequestState) -> float:
    scale = state.request.sampling_params.guidance_scale
    assert scale is not None
    return scale
