"""vLLM-Omni's step contract: requests at different steps share one forward pass of the transformer."""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from triton_diffusion.adapters.adapter import PipelineAdapter
from triton_diffusion.batch import DiffusionRequestBatch
from triton_diffusion.errors import NonFiniteError
from triton_diffusion.output import DiffusionOutput
from triton_diffusion.request import OmniDiffusionRequest


@dataclass(eq=False)
class RequestState:
    """A request between two denoising steps.

    Args:
        scheduler: the request's own copy of the pipeline's scheduler, with its timesteps set.
        timesteps: [number of steps].
        latents: [rows, ...], a row for each image of the request.
        conditioning: what the transformer is conditioned on, by name, each [rows, ...].
        negative_conditioning: the same for the negative prompt; None without classifier-free guidance.
    """

    request: OmniDiffusionRequest
    scheduler: Any
    timesteps: torch.Tensor
    latents: torch.Tensor
    conditioning: dict[str, torch.Tensor]
    negative_conditioning: dict[str, torch.Tensor] | None
    step_index: int = 0
    stage_durations: dict[str, float] = field(default_factory=dict)

    @property
    def num_rows(self) -> int:
        return int(self.latents.shape[0])

    @property
    def timestep(self) -> torch.Tensor:
        return self.timesteps[self.step_index]

    @property
    def is_finished(self) -> bool:
        return self.step_index >= len(self.timesteps)


class StepwiseAdapter(PipelineAdapter):
    """A pipeline cut into four parts; the engine, or `forward`, runs them step by step."""

    supports_request_batch: ClassVar[bool] = True
    supports_step_execution: ClassVar[bool] = True

    @abstractmethod
    def prepare_encode(self, request: OmniDiffusionRequest) -> RequestState:
        """Encode the prompts, draw the noise, set the timesteps: everything that a request needs once."""

    @abstractmethod
    def denoise_step(self, states: Sequence[RequestState]) -> list[torch.Tensor]:
        """The noise predictions of requests of one key, in fused forward passes; [rows, ...] for each.

        Changes no state, so that it can be tried again with fewer requests.
        """

    def step_scheduler(self, state: RequestState, noise_prediction: torch.Tensor) -> None:
        """Take one step. The only place where latents and step_index change."""
        latents = state.scheduler.step(noise_prediction, state.timestep, state.latents, return_dict=False)[0]
        state.latents = latents.to(state.latents.dtype)
        state.step_index += 1

    def post_decode(self, state: RequestState) -> DiffusionOutput:
        """Decode the finished latents to pictures.

        Raises:
            NonFiniteError: the latents hold NaN or infinity, which would decode to a black picture.
        """
        if not torch.isfinite(state.latents).all():
            raise NonFiniteError("the latents are not finite (NaN or infinity); try another guidance_scale or dtype")
        return DiffusionOutput(output=self.decode(state), num_inference_steps=state.step_index)

    @abstractmethod
    def decode(self, state: RequestState) -> Any:
        """The pictures of finished, finite latents: UINT8 [rows, H, W, 3] or [rows, F, H, W, 3]."""

    @torch.no_grad()
    def forward(self, batch: DiffusionRequestBatch) -> list[DiffusionOutput]:
        """All requests in lockstep; one with fewer steps finishes early."""
        states = [self.prepare_encode(request) for request in batch]
        while running := [state for state in states if not state.is_finished]:
            for state, noise_prediction in zip(running, self.denoise_step(running), strict=True):
                self.step_scheduler(state, noise_prediction)
        return [self.post_decode(state) for state in states]

    def fused_forward(self, module: torch.nn.Module, **tensors: torch.Tensor) -> torch.Tensor:
        """`module(**tensors)` for all rows, at most two for each of max_num_seqs at a time.

        Two, because classifier-free guidance evaluates a row twice. So the memory of a forward pass is bounded by
        max_num_seqs, however many images one request asks for.
        """
        limit = 2 * self.config.max_num_seqs
        rows = len(next(iter(tensors.values())))
        outputs = []
        for start in range(0, rows, limit):
            part = {name: tensor[start : start + limit] for name, tensor in tensors.items()}
            if self.config.batch_invariant:
                # Matrix products round differently for different numbers of rows, so there is always the same number.
                part = {name: _padded(tensor, limit) for name, tensor in part.items()}
            outputs.append(module(**part, return_dict=False)[0][: rows - start])
        return torch.cat(outputs)


def _padded(tensor: torch.Tensor, rows: int) -> torch.Tensor:
    """`tensor` with its first row repeated at the end until there are `rows`."""
    return torch.cat([tensor, tensor[:1].expand(rows - len(tensor), *tensor.shape[1:])])


def own_scheduler(scheduler: Any, num_inference_steps: int, device: torch.device, **arguments: Any) -> Any:
    """A request's own copy of a diffusers scheduler: its steps and history are nobody else's."""
    own = copy.deepcopy(scheduler)
    own.set_timesteps(num_inference_steps, device=device, **arguments)
    own.set_begin_index(0)
    return own


def row_generators(request: OmniDiffusionRequest) -> list[torch.Generator]:
    """A new CPU generator for each row, so that the noise is the same on every device and on every try."""
    return [torch.Generator().manual_seed(seed) for seed in request.sampling_params.row_seeds()]


def classifier_free_guidance(negative: torch.Tensor, positive: torch.Tensor, guidance_scale: float) -> torch.Tensor:
    """Noise prediction pushed away from the negative prompt (Ho and Salimans 2022, equation 6)."""
    return negative + guidance_scale * (positive - negative)
