"""A linear layer whose rows have different adapters."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.nn.utils.rnn import pad_sequence

from triton_diffusion.lora.device_cache import num_bytes


class Factors(NamedTuple):
    """The low-rank factors of a layer: they add `inputs @ down.T @ up * scale`.

    Args:
        down: [rank, in features], the same for all rows, or [rows, rank, in features].
        up: [rank, out features], or [rows, rank, out features].
        scale: a number, or [rows, 1, 1].
    """

    down: torch.Tensor
    up: torch.Tensor
    scale: float | torch.Tensor

    def added_to(self, outputs: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
        """`outputs` [rows, tokens, out features], with what the factors make of `inputs` [rows, tokens, in features].

        Rounds where peft's own layer rounds, so that bfloat16 results are the same.
        """
        added = torch.matmul(torch.matmul(inputs.to(self.down.dtype), self.down.mT), self.up)
        changed: torch.Tensor = outputs + (added * self.scale).to(added.dtype)
        return changed.to(outputs.dtype)


RowFactors = list[Factors] | list[list[Factors]]
"""What the rows of a pass add: stacked (the first adapter of every row, the second, ...), or of each row by itself."""


class RowLoraLayer:
    """Adds to a layer's output what the adapters of its rows add.

    Args:
        layer: the linear layer itself.
        adapters: the factors of each adapter that changes it, by the adapter's name, on the CPU.
        factors: those of the rows of the pass that runs; None if they add nothing.
        batch_invariant: multiply each row by itself.
    """

    def __init__(
        self,
        layer: torch.nn.Module,
        adapters: Mapping[str, Factors],
        factors: Callable[[], RowFactors | None],
        batch_invariant: bool,
    ) -> None:
        self._adapters = adapters
        self._factors = factors
        self._batch_invariant = batch_invariant
        # A compiled model would be compiled anew for each composition of rows, up to a limit; so this part is not.
        layer.register_forward_hook(torch.compiler.disable(self._hook))  # type: ignore[no-untyped-call]

    def read(self, adapter: str, device: torch.device) -> Factors | None:
        """One adapter's factors on the device; None if it does not change this layer."""
        factors = self._adapters.get(adapter)
        return None if factors is None else Factors(factors.down.to(device), factors.up.to(device), factors.scale)

    def num_bytes(self, adapter: str) -> int:
        """Bytes of one adapter's factors."""
        factors = self._adapters.get(adapter)
        return 0 if factors is None else num_bytes([factors.down, factors.up])

    def compose(self, rows: Sequence[list[Factors]]) -> RowFactors | None:
        """The factors of a pass, from those of each row; None if no row has any."""
        if not any(rows):
            return None
        if self._batch_invariant:
            return list(rows)
        return rows[0] if all(row is rows[0] for row in rows) else stacked(rows)

    def _hook(self, module: torch.nn.Module, arguments: tuple[torch.Tensor, ...], output: torch.Tensor) -> Any:
        factors = self._factors()
        if factors is None:
            return output
        inputs, outputs = (tensor.reshape(len(tensor), -1, tensor.shape[-1]) for tensor in (arguments[0], output))
        if isinstance(factors[0], Factors):
            for slot in factors:
                outputs = slot.added_to(outputs, inputs)
        else:
            own = list(torch.split(outputs, 1))
            for row, slots in enumerate(factors):
                for slot in slots:
                    own[row] = slot.added_to(own[row], inputs[row : row + 1])
            outputs = torch.cat(own)
        return outputs.reshape(output.shape)


def stacked(rows: Sequence[list[Factors]]) -> list[Factors]:
    """The first adapter of every row, the second of every row, ...; smaller ranks are padded with zeros."""
    some = next(factors for row in rows for factors in row)
    nothing = Factors(some.down[:0], some.up[:0], 0.0)
    return [
        Factors(
            pad_sequence([factors.down for factors in slot], batch_first=True),
            pad_sequence([factors.up for factors in slot], batch_first=True),
            torch.tensor([factors.scale for factors in slot], device=some.up.device)[:, None, None],
        )
        for slot in itertools.zip_longest(*rows, fillvalue=nothing)
    ]
