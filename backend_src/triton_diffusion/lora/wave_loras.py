"""One selection of adapters for all rows of a pass: diffusers' own `set_adapters`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from triton_diffusion.lora.device_cache import DeviceCache, move, num_bytes
from triton_diffusion.lora.loras import Loras
from triton_diffusion.lora.selection import BASE, LoraSelection


class WaveLoras(Loras):
    """Adapters and scales are in the key, so that the rows of a pass want the same.

    Args:
        pipeline: with the adapters loaded.
        adapters: the pipeline's own name of each adapter, by its name.
        parameters: the weights of each adapter, on the CPU.
        budget: bytes of adapters on the device.
    """

    def __init__(
        self,
        pipeline: Any,
        adapters: Mapping[str, str],
        parameters: Mapping[str, Sequence[torch.nn.Parameter]],
        budget: int,
        in_text_encoders: Iterable[str] = (),
    ) -> None:
        super().__init__(adapters, in_text_encoders)
        self._pipeline = pipeline
        self._adapters = adapters
        self._parameters = parameters
        self._sizes = {name: num_bytes(tensors) for name, tensors in parameters.items()}
        self.cache = DeviceCache(self._sizes, budget, self._bring, self._take)
        self._active: LoraSelection | None = None
        self._activate(BASE)

    def largest(self, number: int) -> str:
        return max(self._sizes, key=lambda name: self._sizes[name])

    def before_encoding(self, selection: LoraSelection) -> None:
        super().before_encoding(selection)
        self._activate(selection)

    def before_step(self, selections: Sequence[LoraSelection]) -> None:
        if len(set(selections)) != 1:
            wanted = sorted({str(selection) for selection in selections})
            raise ValueError(f"the requests of a wave want different adapters: {'; '.join(wanted)}")
        self._activate(selections[0])

    def _activate(self, selection: LoraSelection) -> None:
        if selection == self._active:
            return
        self._active = None  # should anything go wrong, nothing is taken for granted
        if selection:
            self.cache.need(selection.names)
            self._pipeline.enable_lora()
            names = [self._adapters[name] for name in selection.names]
            self._pipeline.set_adapters(names, [scale for _, scale in selection.scales])
        else:
            self._pipeline.disable_lora()
        self._active = selection

    def _bring(self, name: str) -> None:
        move(self._parameters[name], self._pipeline._execution_device)

    def _take(self, name: str) -> None:
        move(self._parameters[name], "cpu")
