"""Which LoRA adapters a request wants, and how much of each. Knows nothing of torch."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from dataclasses import dataclass

from triton_diffusion.errors import FieldValueError
from triton_diffusion.sampling_params import SamplingParams

LARGEST_SCALE = 100.0
"""Of an adapter, in both directions: a negative one turns an adapter's effect around."""


@dataclass(frozen=True)
class LoraSelection:
    """LoRA adapters by name, each with its scale; sorted, so that equal selections are equal values.

    An adapter of scale 0 changes nothing and is left out.
    """

    scales: tuple[tuple[str, float], ...] = ()

    @classmethod
    def of(cls, sampling_params: SamplingParams) -> LoraSelection:
        """The selection of a request: its `lora`, all scales times its `lora_scale`.

        Raises:
            FieldValueError: `lora` is not a list of names with scales.
        """
        return _selection(sampling_params.lora or "", sampling_params.lora_scale)

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.scales]

    def only(self, names: Iterable[str]) -> LoraSelection:
        """The part of the selection that is among `names`."""
        wanted = frozenset(names)
        return LoraSelection(tuple((name, scale) for name, scale in self.scales if name in wanted))

    def __bool__(self) -> bool:
        return bool(self.scales)

    def __str__(self) -> str:
        return ",".join(f"{name}:{scale:g}" for name, scale in self.scales)


BASE = LoraSelection()
"""No adapter: the model itself."""


def named(sampling_params: SamplingParams) -> list[str]:
    """The names in the `lora` of a request, those of scale 0 too.

    Raises:
        FieldValueError: `lora` is not a list of names with scales.
    """
    return list(_scales(sampling_params.lora or ""))


@functools.lru_cache(maxsize=1024)
def _selection(lora: str, lora_scale: float | None) -> LoraSelection:
    factor = 1.0 if lora_scale is None else lora_scale
    # Six digits, so that 0.8 is the same whether it came as FP32, as FP64 or as text.
    scales = {name: float(f"{scale * factor:.6g}") for name, scale in _scales(lora).items()}
    for name, scale in scales.items():
        if abs(scale) > LARGEST_SCALE:
            raise FieldValueError(
                f"lora={lora!r} lora_scale={factor:g}: {name} has the scale {scale:g}; must be from "
                f"{-LARGEST_SCALE:g} to {LARGEST_SCALE:g}"
            )
    return LoraSelection(tuple(sorted((name, scale) for name, scale in scales.items() if scale)))


def _scales(lora: str) -> dict[str, float]:
    """The names and scales of `a:0.8,b:0.3`; a name alone has the scale 1."""
    scales: dict[str, float] = {}
    for entry in lora.split(",") if lora.strip() else ():
        name, colon, text = (part.strip() for part in entry.partition(":"))
        scale = _number(text) if colon else 1.0
        if not name or scale is None:
            raise FieldValueError(
                f"lora={lora!r}: must be names of adapters with commas between them, each with a scale after a colon "
                f"or without one: 'ink' or 'ink:0.8,night:0.3'; a scale is a number from {-LARGEST_SCALE:g} to "
                f"{LARGEST_SCALE:g}"
            )
        if name in scales:
            raise FieldValueError(f"lora={lora!r}: names {name!r} twice; give it once, with one scale")
        scales[name] = scale
    return scales


def _number(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) and abs(number) <= LARGEST_SCALE else None
