"""A tiny pipeline with LoRA adapters as it is served, beside the same as a user of diffusers runs it."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tests.families import Family
from tests.tiny_loras import set_stock_adapters
from triton_diffusion.lora import LoraSelection
from triton_diffusion.lora.files import find_loras
from triton_diffusion.lora.loading import load_loras
from triton_diffusion.request import OmniDiffusionRequest

LORAS = ("ink", None, "night:1.5", "wide", "ink:1.5", "ink:0.8,night:-1.3", None, "wide:0.7")
"""What the rows of a mixed wave want."""


class Served(NamedTuple):
    """A family's tiny pipeline, the same with its adapters loaded by stock diffusers, and where the adapters are."""

    family: Family
    build: Any
    stock: Any
    directory: Path

    def adapter(self, pipeline: Any, **config: Any) -> Any:
        """An engine's adapter for a new pipeline with the LoRA adapters of the directory."""
        adapter = self.family.adapter(pipeline, lora_directory=str(self.directory), **config)
        files = find_loras(adapter.config.lora_directory, {}, Path())
        adapter.loras = load_loras(pipeline, files, adapter.config)
        return adapter

    def requests(self, adapter: Any, loras: tuple[str | None, ...] = LORAS) -> list[OmniDiffusionRequest]:
        requests = self.family.requests(adapter, len(loras), num_images_per_prompt=1)
        requests = [with_lora(request, lora) for request, lora in zip(requests, loras, strict=True)]
        requests[-1] = with_lora(requests[-1], loras[-1], num_images_per_prompt=2)  # whose two rows want the same
        return requests

    def stock_call(self, request: OmniDiffusionRequest) -> torch.Tensor:
        set_stock_adapters(self.stock, LoraSelection.of(request.sampling_params))
        latents: torch.Tensor = self.family.stock_call(self.stock, request, "latent")
        return latents


def with_lora(request: OmniDiffusionRequest, lora: str | None, **sampling: Any) -> OmniDiffusionRequest:
    return dataclasses.replace(
        request, sampling_params=dataclasses.replace(request.sampling_params, lora=lora, **sampling)
    )
