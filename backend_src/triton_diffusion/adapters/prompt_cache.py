"""Encodes a prompt once for all requests that use it at about the same time."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any


class PromptCache:
    """A pipeline's `encode_prompt` that remembers its last results, least recently used first to go.

    The results are shared, and nobody writes into them. Calls with arguments that cannot be compared by value (an
    image) are passed on.

    Args:
        encode_prompt: the pipeline's own method.
        size: results that are kept.
        variant: what the result depends on besides the arguments: the adapters in the text encoders.
    """

    def __init__(self, encode_prompt: Callable[..., Any], size: int, variant: Callable[[], Hashable] = tuple) -> None:
        self.encode_prompt = encode_prompt
        self._size = size
        self._variant = variant
        self._results: OrderedDict[Hashable, Any] = OrderedDict()

    def __call__(self, *positional: Any, **named: Any) -> Any:
        if not all(_is_plain(value) for value in (*positional, *named.values())):
            return self.encode_prompt(*positional, **named)
        key = (self._variant(), positional, tuple(sorted(named.items())))
        if key not in self._results:
            self._results[key] = self.encode_prompt(*positional, **named)
            if len(self._results) > self._size:
                self._results.popitem(last=False)
        self._results.move_to_end(key)
        return self._results[key]


def _is_plain(value: Any) -> bool:
    """Whether equal values mean equal results; a device is compared by value too."""
    return value is None or isinstance(value, (str, int, float, bool)) or type(value).__name__ == "device"
