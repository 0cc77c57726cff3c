"""Different adapters for the rows of one pass: each layer multiplies every row by that row's own low-rank factors."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from diffusers.loaders.lora_base import (
    disable_lora_for_text_encoder,
    enable_lora_for_text_encoder,
    set_adapters_for_text_encoder,
)

from triton_diffusion.lora.device_cache import DeviceCache
from triton_diffusion.lora.loras import Loras
from triton_diffusion.lora.row_lora_layer import Factors, RowFactors, RowLoraLayer
from triton_diffusion.lora.selection import BASE, LoraSelection


class RowLoras(Loras):
    """Adapter and scale may differ from row to row.

    In the transformers there are no layers of peft; what these would add is added row by row (as S-LoRA, Sheng et al.
    2023, does for language models). A prompt is encoded for one request at a time, so the text encoders are
    set as diffusers sets them.

    Args:
        adapters: the text encoders' own name of each adapter, by its name.
        layers: of the transformers, those that an adapter changes, with the factors of each of these adapters.
        text_encoders: the components that encode prompts.
        device: of the transformers.
        budget: bytes of adapters that are kept on the device.
        batch_invariant: multiply each row by itself, so that its result does not depend on the ranks of the others.
    """

    is_mixed = True

    def __init__(
        self,
        adapters: Mapping[str, str],
        layers: Iterable[tuple[torch.nn.Module, Mapping[str, Factors]]],
        text_encoders: Sequence[Any],
        device: torch.device,
        budget: int,
        in_text_encoders: Iterable[str] = (),
        batch_invariant: bool = False,
    ) -> None:
        super().__init__(adapters, in_text_encoders)
        self._adapters = adapters
        self._text_encoders = text_encoders
        self._device = device
        self._layers = [
            RowLoraLayer(layer, factors, functools.partial(self._current_factors, place), batch_invariant)
            for place, (layer, factors) in enumerate(layers)
        ]
        self._current: list[RowFactors | None] | None = None
        self._on_device: dict[str, list[Factors | None]] = {}
        self._wanted: list[LoraSelection] = []
        self._compositions: dict[tuple[LoraSelection, ...], list[RowFactors | None]] = {}
        self._sizes = {name: sum(layer.num_bytes(name) for layer in self._layers) for name in adapters}
        self.cache = DeviceCache(self._sizes, budget, self._bring, self._on_device.__delitem__)
        self.before_encoding(BASE)

    def largest(self, number: int) -> str:
        by_size = sorted(self._sizes, key=lambda name: -self._sizes[name])
        return by_size[number % len(by_size)]

    def before_encoding(self, selection: LoraSelection) -> None:
        super().before_encoding(selection)
        for text_encoder in self._text_encoders if self.in_text_encoders else ():
            if self.encoding:
                enable_lora_for_text_encoder(text_encoder)
                names = [self._adapters[name] for name in self.encoding.names]
                set_adapters_for_text_encoder(names, text_encoder, [scale for _, scale in self.encoding.scales])
            else:
                disable_lora_for_text_encoder(text_encoder)

    def before_step(self, selections: Sequence[LoraSelection]) -> None:
        self._current = None  # until a pass says what its rows are
        if list(selections) != self._wanted:
            # What the passes of one step need is kept for the next steps of the same requests, and no longer.
            self._wanted = list(selections)
            self._compositions.clear()

    def before_pass(self, rows: Sequence[LoraSelection]) -> None:
        self._current = self._composed(tuple(rows))

    def _current_factors(self, place: int) -> RowFactors | None:
        if self._current is None:
            raise RuntimeError("lora_mixed: the model was run without fused_forward, which knows the rows' adapters")
        return self._current[place]

    def _composed(self, rows: tuple[LoraSelection, ...]) -> list[RowFactors | None]:
        """The factors of all rows, for each layer; None for a layer that no row changes."""
        self.cache.need(dict.fromkeys(name for selection in rows for name in selection.names))
        if rows not in self._compositions:
            own = {selection: self._factors(selection) for selection in set(rows)}
            self._compositions[rows] = [
                layer.compose([own[selection][place] for selection in rows])
                for place, layer in enumerate(self._layers)
            ]
        return self._compositions[rows]

    def _factors(self, selection: LoraSelection) -> list[list[Factors]]:
        """What each adapter of a request adds, for each layer."""
        return [
            [
                factors._replace(scale=factors.scale * scale)
                for name, scale in selection.scales
                if (factors := self._on_device[name][place]) is not None
            ]
            for place in range(len(self._layers))
        ]

    def _bring(self, name: str) -> None:
        self._on_device[name] = [layer.read(name, self._device) for layer in self._layers]
