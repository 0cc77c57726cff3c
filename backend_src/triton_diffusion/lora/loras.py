"""The LoRA adapters of a served pipeline, and how a pass of the model gets those that its rows want."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from triton_diffusion.errors import FieldValueError, did_you_mean
from triton_diffusion.lora.selection import BASE, LoraSelection, named
from triton_diffusion.sampling_params import SamplingParams


class Loras:
    """Before the model is run, whoever runs it says what is wanted; so nothing is left of the run before.

    This class is that of a model without adapters.

    Args:
        names: of the adapters, fixed until the model is loaded again.
        in_text_encoders: the names of those that change a text encoder.
    """

    is_mixed = False
    """Rows of one pass may have different adapters; else adapters and scales are in the key."""

    def __init__(self, names: Iterable[str] = (), in_text_encoders: Iterable[str] = ()) -> None:
        self.names = tuple(names)
        self.in_text_encoders = frozenset(in_text_encoders)
        self._encoding = BASE

    def check(self, sampling_params: SamplingParams, defaults: SamplingParams) -> None:
        """
        Raises:
            FieldValueError: an adapter that the model does not have; lists those that it has.
        """
        scale = sampling_params.lora_scale
        if sampling_params.lora is None and scale not in (None, defaults.lora_scale):
            raise FieldValueError(f"lora_scale={scale}: scales an adapter: name it in lora as well")
        LoraSelection.of(sampling_params)  # which refuses scales that are too large
        unknown = [name for name in named(sampling_params) if name not in self.names]
        if unknown and not self.names:
            raise FieldValueError(
                f"lora={sampling_params.lora!r}: this model has no adapters (lora_directory in config.pbtxt)"
            )
        if unknown:
            suggestion = did_you_mean(unknown[0], self.names)
            listed = f" Known are: {', '.join(self.names)}" if suggestion.endswith("?") else ""
            raise FieldValueError(
                f"lora={sampling_params.lora!r}: there is no adapter {unknown[0]!r}{suggestion}{listed}"
            )

    def key(self, selection: LoraSelection) -> str | None:
        """What the key of a request holds of its adapters; None if nothing."""
        return None if self.is_mixed or not selection else str(selection)

    def largest(self, number: int) -> str:
        """The name of the adapter of the request of that number, in a wave that needs as much memory as one can."""
        return ""

    @property
    def encoding(self) -> LoraSelection:
        """What the text encoders have now: prompts that were encoded with another selection are not the same."""
        return self._encoding

    def before_encoding(self, selection: LoraSelection) -> None:
        """Give the text encoders what a request wants."""
        self._encoding = selection.only(self.in_text_encoders)

    def before_step(self, selections: Sequence[LoraSelection]) -> None:
        """Told of each request of the next step what it wants."""

    def before_pass(self, rows: Sequence[LoraSelection]) -> None:
        """Told of each row of the next pass, in order, what its request wants; a step may have several passes."""
