"""What of the adapters is on the device: as much as a budget allows, least recently used first to go."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable

import torch


class DeviceCache:
    """Brings adapters to the device when they are needed, and takes others from it to stay within a budget.

    What is needed at once is on the device at once, even if that alone is more than the budget.

    Args:
        sizes: bytes of each adapter.
        budget: bytes.
        bring, take: put an adapter onto the device, or away from it.
    """

    def __init__(
        self, sizes: dict[str, int], budget: int, bring: Callable[[str], None], take: Callable[[str], None]
    ) -> None:
        self._sizes = sizes
        self._budget = budget
        self._bring = bring
        self._take = take
        self._present: OrderedDict[str, None] = OrderedDict()

    @property
    def present(self) -> list[str]:
        """The adapters on the device, least recently used first."""
        return list(self._present)

    def need(self, names: Iterable[str]) -> None:
        """Have all of these on the device."""
        wanted = list(names)
        for name in wanted:
            if name in self._present:
                self._present.move_to_end(name)
        missing = [name for name in wanted if name not in self._present]
        room = self._budget - sum(self._sizes[name] for name in missing)
        for name in self.present:
            if sum(self._sizes[present] for present in self._present) <= room:
                break
            if name not in wanted:
                del self._present[name]  # before room is made for the new ones
                self._take(name)
        for name in missing:
            self._bring(name)
            self._present[name] = None


def num_bytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def move(parameters: Iterable[torch.nn.Parameter], device: torch.device | str) -> None:
    """Move weights without the modules that they are part of."""
    for parameter in parameters:
        parameter.data = parameter.data.to(device)
