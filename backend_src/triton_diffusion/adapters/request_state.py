"""A request between two denoising steps."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch

from triton_diffusion.lora import LoraSelection
from triton_diffusion.request import OmniDiffusionRequest

Conditioning = dict[str, torch.Tensor]
"""What the model is conditioned on besides the latents and the timestep, by its argument's name, each [rows, ...]."""


@dataclass(eq=False)
class RequestState:
    """A request between two denoising steps.

    Args:
        scheduler: the request's own copy of the pipeline's scheduler, with its timesteps set.
        latents: [rows, ...], a row for each image of the request.
        conditioning: of the prompt.
        negative_conditioning: of the negative prompt; None without classifier-free guidance.
        generators: of each row; the noise of stochastic schedulers comes from them too.
        decoded: the pictures of the first rows, while the request is decoded in parts.
    """

    request: OmniDiffusionRequest
    scheduler: Any
    latents: torch.Tensor
    conditioning: Conditioning
    negative_conditioning: Conditioning | None = None
    generators: list[torch.Generator] = field(default_factory=list)
    first_step: int = 0
    step_index: int = 0
    decoded: list[np.ndarray[Any, Any]] = field(default_factory=list)

    @property
    def lora(self) -> LoraSelection:
        """The adapters that the request wants."""
        return LoraSelection.of(self.request.sampling_params)

    @property
    def num_rows(self) -> int:
        return int(self.latents.shape[0])

    @property
    def timesteps(self) -> torch.Tensor:
        """The timesteps that the request takes: [steps]."""
        timesteps: torch.Tensor = self.scheduler.timesteps[self.first_step :]
        return timesteps

    @property
    def timestep(self) -> torch.Tensor:
        return self.timesteps[self.step_index]

    @property
    def is_finished(self) -> bool:
        return self.step_index >= len(self.timesteps)


class Evaluation(NamedTuple):
    """A request's rows under one conditioning, as the model evaluates them."""

    state: RequestState
    conditioning: Conditioning
