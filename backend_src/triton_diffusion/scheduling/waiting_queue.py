"""The requests that wait, by key, each key's in order of priority and then of arrival."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Hashable
from typing import Generic, NamedTuple, TypeVar

Key = TypeVar("Key", bound=Hashable)


class Place(NamedTuple):
    """A request's place in the order of all that wait: the smaller goes first."""

    priority: int
    arrival: int


class WaitingQueue(Generic[Key]):
    """Waiting requests, grouped by key so that the oldest of each key is found at once."""

    def __init__(self) -> None:
        self._queues: dict[Key, list[tuple[Place, str]]] = {}
        self._members: dict[str, tuple[Key, Place]] = {}
        self._arrivals = itertools.count()

    def __len__(self) -> int:
        return len(self._members)

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._members

    @property
    def request_ids(self) -> list[str]:
        """Every waiting request, the first to go first."""
        return [request_id for _, request_id in sorted(itertools.chain.from_iterable(self._queues.values()))]

    @property
    def counts(self) -> dict[Key, int]:
        """How many requests of each key wait."""
        return {key: len(queue) for key, queue in self._queues.items()}

    def add(self, request_id: str, key: Key, priority: int) -> None:
        """Let a request wait behind all of its priority."""
        place = Place(priority, next(self._arrivals))
        self._members[request_id] = (key, place)
        bisect.insort(self._queues.setdefault(key, []), (place, request_id))

    def first_key(self) -> Key | None:
        """The key of the request that goes first; None if nobody waits."""
        return min(self._queues, key=lambda key: self._queues[key][0], default=None)

    def count(self, key: Key) -> int:
        """How many requests of `key` wait."""
        return len(self._queues.get(key, ()))

    def take(self, key: Key, most: int) -> list[str]:
        """Remove and return the first requests of `key`, at most `most`."""
        taken = [request_id for _, request_id in self._queues.get(key, ())[:most]]
        for request_id in taken:
            self.remove(request_id)
        return taken

    def remove(self, request_id: str) -> None:
        """Forget a waiting request.

        Raises:
            KeyError: it does not wait.
        """
        key, place = self._members.pop(request_id)
        queue = self._queues[key]
        queue.remove((place, request_id))
        if not queue:
            del self._queues[key]
