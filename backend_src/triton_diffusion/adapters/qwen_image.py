"""Qwen-Image: `QwenImagePipeline`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import torch

from triton_diffusion.adapters.adapter import check_most, check_size
from triton_diffusion.adapters.request_state import Conditioning, Evaluation, RequestState
from triton_diffusion.adapters.rows import (
    predicted_by_group,
    repeated_conditioning,
    row_generators,
    stacked_conditioning,
    stacked_latents,
    stacked_timesteps,
)
from triton_diffusion.adapters.schedulers import dynamic_shift, own_scheduler
from triton_diffusion.adapters.stepwise import StepwiseAdapter
from triton_diffusion.errors import FieldValueError, InvalidRequestError
from triton_diffusion.request import OmniDiffusionRequest
from triton_diffusion.sampling_params import SamplingParams, resolved


class QwenImageAdapter(StepwiseAdapter):
    """Prompts of any length share a pass: the shorter ones are padded, and the padding is masked."""

    # Not max_sequence_length: texts may have any length, and it only cuts them.
    key_fields: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("height", "width"), "all rows of a pass have the positions of one image grid"
    )
    guides_in_one_pass: ClassVar[bool] = False
    guidance_field: ClassVar[str] = "true_cfg_scale"

    text_bucket: ClassVar[int] = 512
    """With batch_invariant, texts are padded to a multiple of this: so large that nearly all share a pass."""

    def complete(self, defaults: SamplingParams) -> SamplingParams:
        size = self.pipeline.default_sample_size * self.pipeline.vae_scale_factor
        return dataclasses.replace(defaults, height=size, width=size)

    def check_request(self, request: OmniDiffusionRequest) -> None:
        super().check_request(request)
        params = request.sampling_params
        check_size(params, 2 * self.pipeline.vae_scale_factor)
        check_most("max_sequence_length", params.max_sequence_length, 1024)
        if params.num_inference_steps == 1 and self.pipeline.scheduler.config.get("shift_terminal"):
            raise FieldValueError(
                "num_inference_steps=1: must be at least 2, as the scheduler of this model would divide by zero"
            )
        if self.pipeline.transformer.config.guidance_embeds and params.guidance_scale is None:
            raise InvalidRequestError(
                "guidance_scale is missing: this model is guidance-distilled, and has no default"
            )

    @torch.no_grad()
    def prepare_encode(self, request: OmniDiffusionRequest) -> RequestState:
        pipeline, params = self.pipeline, request.sampling_params
        generators = row_generators(request)

        # 1. Encode the prompts, once for all images of the request
        inputs = self.encoder_inputs(request)
        conditioning = self._encode(request.prompt, params, len(generators), inputs)
        negative_conditioning = None
        if resolved(params.true_cfg_scale) > 1 and request.negative_prompt is not None:
            negative_conditioning = self._encode(request.negative_prompt, params, len(generators), inputs)

        # 2. Draw the noise of each row by itself
        dtype = conditioning["encoder_hidden_states"].dtype
        latents = torch.cat([self.draw_noise(params, dtype, generator) for generator in generators])

        # 3. Set the timesteps
        steps = resolved(params.num_inference_steps)
        scheduler = own_scheduler(
            pipeline.scheduler,
            pipeline._execution_device,
            sigmas=np.linspace(1.0, 1 / steps, steps),
            **dynamic_shift(pipeline.scheduler, latents.shape[1], max_shift=1.15),
        )
        return RequestState(
            request=request,
            scheduler=scheduler,
            latents=latents,
            conditioning=conditioning,
            negative_conditioning=negative_conditioning,
            generators=generators,
        )

    def encoder_inputs(self, request: OmniDiffusionRequest) -> dict[str, Any]:
        """What the prompts are encoded with, besides the text."""
        return {}

    def draw_noise(self, params: SamplingParams, dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
        """The noise of one row, packed as all latents are: [1, image tokens, channels]."""
        noise: torch.Tensor = self.pipeline.prepare_latents(
            batch_size=1, dtype=dtype, generator=generator, **self.latents_arguments(params)
        )
        return noise

    def latents_arguments(self, params: SamplingParams) -> dict[str, Any]:
        """The arguments of `prepare_latents` that all of a request's rows share."""
        return {
            "num_channels_latents": self.pipeline.transformer.config.in_channels // 4,
            "height": params.height,
            "width": params.width,
            "device": self.pipeline._execution_device,
        }

    def predict(self, evaluations: Sequence[Evaluation]) -> torch.Tensor:
        if self.config.batch_invariant:
            return self._predict_in_buckets(evaluations)
        longest = max(_text_tokens(evaluation) for evaluation in evaluations)
        if any(_text_tokens(evaluation) < longest for evaluation in evaluations):
            evaluations = [_padded(evaluation, longest) for evaluation in evaluations]
        return self._predict(evaluations)

    def model_arguments(self, evaluations: Sequence[Evaluation]) -> dict[str, Any]:
        """The arguments of the transformer, each [all rows, ...]."""
        latents = stacked_latents(evaluations)
        timesteps = stacked_timesteps(evaluations).to(latents.dtype) / 1000
        return {"hidden_states": latents, "timestep": timesteps, **stacked_conditioning(evaluations)}

    def image_shapes(self, request: OmniDiffusionRequest) -> list[tuple[int, int, int]]:
        """The frames, rows and columns of image tokens of every image in `hidden_states`."""
        params = request.sampling_params
        return [self.image_shape(resolved(params.height), resolved(params.width))]

    def image_shape(self, height: int, width: int) -> tuple[int, int, int]:
        token = 2 * self.pipeline.vae_scale_factor
        return (1, height // token, width // token)

    def guide(self, state: RequestState, negative: torch.Tensor, positive: torch.Tensor) -> torch.Tensor:
        """Classifier-free guidance, with the norm that each token had before it."""
        guided = super().guide(state, negative, positive)
        rescaling: torch.Tensor = torch.norm(positive, dim=-1, keepdim=True) / torch.norm(guided, dim=-1, keepdim=True)
        return guided * rescaling

    def decode_rows(self, state: RequestState, latents: torch.Tensor) -> torch.Tensor:
        vae, params = self.pipeline.vae, state.request.sampling_params
        latents = self.pipeline._unpack_latents(latents, params.height, params.width, self.pipeline.vae_scale_factor)
        latents = latents.to(vae.dtype)
        mean, deviation = (
            torch.tensor(values).view(1, -1, 1, 1, 1).to(latents)
            for values in (vae.config.latents_mean, vae.config.latents_std)
        )
        latents = latents / (1.0 / deviation) + mean  # not latents * deviation: the bits of the stock call
        frames: torch.Tensor = vae.decode(latents, return_dict=False)[0]
        return frames[:, :, 0]

    def _encode(self, prompt: str, params: SamplingParams, rows: int, inputs: dict[str, Any]) -> Conditioning:
        # A prompt encoded by itself has no padding, and so no mask.
        embeds, _ = self.pipeline.encode_prompt(
            prompt=prompt,
            device=self.pipeline._execution_device,
            max_sequence_length=params.max_sequence_length,
            **inputs,
        )
        conditioning = {"encoder_hidden_states": embeds}
        if self.pipeline.transformer.config.guidance_embeds:
            scale = torch.full([1], resolved(params.guidance_scale), device=embeds.device, dtype=torch.float32)
            conditioning["guidance"] = scale
        return repeated_conditioning(conditioning, rows)

    def _predict(self, evaluations: Sequence[Evaluation]) -> torch.Tensor:
        # The model takes the positions of all rows from the first entry of img_shapes.
        shared = {"img_shapes": [self.image_shapes(evaluations[0].state.request)]}
        arguments = self.model_arguments(evaluations)
        return self.fused_forward(self.pipeline.transformer, evaluations, shared=shared, **arguments)

    def _predict_in_buckets(self, evaluations: Sequence[Evaluation]) -> torch.Tensor:
        """The predictions, where the length that a text is padded to depends on nobody else's text."""
        lengths = [-(-_text_tokens(evaluation) // self.text_bucket) * self.text_bucket for evaluation in evaluations]
        padded = [_padded(evaluation, length) for evaluation, length in zip(evaluations, lengths, strict=True)]
        return predicted_by_group(padded, lengths, lambda _, together: self._predict(together))


def _text_tokens(evaluation: Evaluation) -> int:
    return int(evaluation.conditioning["encoder_hidden_states"].shape[1])


def _padded(evaluation: Evaluation, length: int) -> Evaluation:
    """The evaluation with its text padded to `length` tokens, and the mask that hides the padding."""
    embeds = evaluation.conditioning["encoder_hidden_states"]
    rows, tokens = embeds.shape[:2]
    text = {
        "encoder_hidden_states": torch.nn.functional.pad(embeds, (0, 0, 0, length - tokens)),
        "encoder_hidden_states_mask": (torch.arange(length, device=embeds.device) < tokens).expand(rows, length),
    }
    return evaluation._replace(conditioning={**evaluation.conditioning, **text})
