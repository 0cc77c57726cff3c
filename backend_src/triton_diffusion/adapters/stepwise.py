"""vLLM-Omni's step contract: requests at different steps share one forward pass of the transformer."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar

import numpy as np
import torch

from triton_diffusion.adapters.adapter import PipelineAdapter, to_uint8
from triton_diffusion.adapters.prompt_cache import PromptCache
from triton_diffusion.adapters.request_state import Evaluation, RequestState
from triton_diffusion.adapters.rows import cut_rows, padded_rows
from triton_diffusion.batch import DiffusionRequestBatch
from triton_diffusion.config import EngineConfig
from triton_diffusion.errors import NonFiniteError
from triton_diffusion.lora import LoraSelection
from triton_diffusion.output import DiffusionOutput
from triton_diffusion.request import OmniDiffusionRequest
from triton_diffusion.sampling_params import resolved


class StepwiseAdapter(PipelineAdapter):
    """A pipeline cut into parts; the engine, or `forward`, runs them step by step."""

    supports_request_batch: ClassVar[bool] = True
    supports_step_execution: ClassVar[bool] = True

    def __init__(self, pipeline: Any, config: EngineConfig) -> None:
        super().__init__(pipeline, config)
        self.forward_rows: list[int] = []
        """The rows of each forward pass, until somebody who counts them clears it."""
        encode_prompt = getattr(pipeline, "encode_prompt", None)
        if encode_prompt is not None and not isinstance(encode_prompt, PromptCache):
            pipeline.encode_prompt = PromptCache(
                encode_prompt, size=2 * config.max_num_seqs, variant=lambda: self.loras.encoding
            )

    guides_in_one_pass: ClassVar[bool] = True
    """The stock call evaluates the negative and the positive prompt in one forward pass, not in two."""

    guidance_field: ClassVar[str] = "guidance_scale"
    """The sampling parameter that holds the scale of classifier-free guidance."""

    @abstractmethod
    def prepare_encode(self, request: OmniDiffusionRequest) -> RequestState:
        """Encode the prompts, draw the noise, set the timesteps: everything that a request needs once."""

    def encode_request(self, request: OmniDiffusionRequest) -> RequestState:
        """`prepare_encode`, with the request's own adapters in the text encoders."""
        self.loras.before_encoding(LoraSelection.of(request.sampling_params))
        return self.prepare_encode(request)

    @abstractmethod
    def predict(self, evaluations: Sequence[Evaluation]) -> torch.Tensor:
        """The model's predictions for all evaluations, in one fused forward pass: [all rows, ...]."""

    @torch.no_grad()
    def denoise_step(self, states: Sequence[RequestState]) -> list[torch.Tensor]:
        """The noise predictions of requests of one key, in fused forward passes; [rows, ...] for each.

        Changes no state, so that it can be tried again with fewer requests.
        """
        positive = [Evaluation(state, state.conditioning) for state in states]
        negative = [
            Evaluation(state, state.negative_conditioning)
            for state in states
            if state.negative_conditioning is not None
        ]
        if self.guides_in_one_pass:
            parts = self._parts([*negative, *positive])
            negative_parts, positive_parts = parts[: len(negative)], parts[len(negative) :]
        else:
            positive_parts = self._parts(positive)
            negative_parts = self._parts(negative) if negative else []
        predictions = iter(negative_parts)
        return [
            part if state.negative_conditioning is None else self.guide(state, next(predictions), part)
            for state, part in zip(states, positive_parts, strict=True)
        ]

    def guidance_scale(self, state: RequestState) -> float:
        """The scale of the classifier-free guidance of the request's next step."""
        scale: float | None = getattr(state.request.sampling_params, self.guidance_field)
        return resolved(scale)

    def guide(self, state: RequestState, negative: torch.Tensor, positive: torch.Tensor) -> torch.Tensor:
        """Classifier-free guidance: away from the negative prompt (Ho and Salimans 2022, equation 6)."""
        return negative + self.guidance_scale(state) * (positive - negative)

    def step_scheduler(self, state: RequestState, noise_prediction: torch.Tensor) -> None:
        """Take one step. The only place where latents and step_index change."""
        arguments = self.scheduler_arguments(state)
        step = state.scheduler.step(noise_prediction, state.timestep, state.latents, return_dict=False, **arguments)
        state.latents = step[0].to(state.latents.dtype)
        state.step_index += 1

    def scheduler_arguments(self, state: RequestState) -> dict[str, Any]:
        """Further arguments of `scheduler.step`."""
        if getattr(state.scheduler.config, "stochastic_sampling", False):
            # The stock calls leave it to the global generator, so that nobody can make the same picture again.
            return {"generator": state.generators}
        return {}

    def post_decode(self, state: RequestState) -> DiffusionOutput:
        """Decode the finished latents to pictures.

        Raises:
            NonFiniteError: the latents hold NaN or infinity, which would decode to a black picture.
        """
        if not torch.isfinite(state.latents).all():
            raise NonFiniteError("the latents are not finite (NaN or infinity); try another guidance_scale or dtype")
        return DiffusionOutput(output=self.decode(state), num_inference_steps=state.step_index)

    @torch.no_grad()
    def decode(self, state: RequestState) -> Any:
        """The pictures of finished latents: UINT8 [rows, H, W, 3] or [rows, F, H, W, 3]."""
        # Row by row by default: bounded memory, and the same bits as decoding the row alone.
        return np.concatenate(
            [
                to_uint8(self.postprocess(self.decode_rows(state, rows)))
                for rows in torch.split(state.latents, self.config.decode_batch_size)
            ]
        )

    def postprocess(self, pixels: torch.Tensor) -> np.ndarray[Any, Any]:
        """The decoder's output as pixels in [0, 1]: [rows, H, W, 3]."""
        processed: np.ndarray[Any, Any] = self.pipeline.image_processor.postprocess(pixels, output_type="np")
        return processed

    def decode_rows(self, state: RequestState, latents: torch.Tensor) -> torch.Tensor:
        """The decoder's output for some rows: [rows, 3, H, W]."""
        vae = self.pipeline.vae
        latents = latents / vae.config.scaling_factor + (getattr(vae.config, "shift_factor", None) or 0.0)
        pixels: torch.Tensor = vae.decode(latents.to(vae.dtype), return_dict=False)[0]
        return pixels

    @torch.no_grad()
    def forward(self, batch: DiffusionRequestBatch) -> list[DiffusionOutput]:
        """All requests in lockstep; one with fewer steps finishes early."""
        states = [self.encode_request(request) for request in batch]
        self.denoise(states)
        return [self.post_decode(state) for state in states]

    @torch.no_grad()
    def denoise(self, states: Sequence[RequestState]) -> None:
        """Take all steps that are left of all requests."""
        while running := [state for state in states if not state.is_finished]:
            self.loras.before_step([state.lora for state in running])
            for state, noise_prediction in zip(running, self.denoise_step(running), strict=True):
                self.step_scheduler(state, noise_prediction)

    def fused_forward(
        self,
        module: torch.nn.Module,
        evaluations: Sequence[Evaluation],
        shared: Mapping[str, Any] = MappingProxyType({}),
        **arguments: Any,
    ) -> torch.Tensor:
        """`module(**arguments, **shared)` for all rows of the evaluations, at most max_num_seqs at a time.

        Twice as many where classifier-free guidance evaluates a row twice in one pass. So the memory of a forward
        pass is bounded by max_num_seqs, however many images one request asks for.

        Args:
            shared: arguments without rows.
            arguments: tensors and lists with an entry for each row (and dicts of these); or None.
        """
        limit = self.config.max_num_seqs * (2 if self.guides_in_one_pass else 1)
        loras = [each.state.lora for each in evaluations for _ in range(each.state.num_rows)]
        rows = len(loras)
        outputs = []
        for start in range(0, rows, limit):
            part = {name: cut_rows(value, rows, start, start + limit) for name, value in arguments.items()}
            own_loras = loras[start : start + limit]
            if self.config.batch_invariant:
                # Matrix products round differently for different numbers of rows, so there is always the same number.
                count = len(own_loras)
                part = {name: padded_rows(value, count, limit) for name, value in part.items()}
                own_loras = padded_rows(own_loras, count, limit)
            self.loras.before_pass(own_loras)
            outputs.append(module(**part, **shared, return_dict=False)[0][: rows - start])
            self.forward_rows.append(len(outputs[-1]))
        return torch.cat(outputs)

    def _parts(self, evaluations: Sequence[Evaluation]) -> list[torch.Tensor]:
        """The predictions of each evaluation."""
        prediction = self.predict(evaluations)
        return list(torch.split(prediction, [evaluation.state.num_rows for evaluation in evaluations]))
