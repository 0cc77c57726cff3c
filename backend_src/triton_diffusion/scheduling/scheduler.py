"""What both policies share: who waits, who runs, and how many may."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

from triton_diffusion.errors import QueueFullError
from triton_diffusion.scheduling.waiting_queue import WaitingQueue

Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True)
class Wave(Generic[Key]):
    """Requests of one key that share the next forward pass, in the order in which they began to run."""

    wave_id: int
    key: Key
    request_ids: tuple[str, ...]


class Scheduler(ABC, Generic[Key]):
    """Waiting and running requests; a policy says in `schedule` which of them take the next step.

    Args:
        max_num_seqs: the most requests that run; config.pbtxt's max_batch_size.
        max_queue_size: the most requests that may wait.
    """

    def __init__(self, max_num_seqs: int, max_queue_size: int) -> None:
        if max_num_seqs < 1 or max_queue_size < 1:
            raise ValueError(f"{max_num_seqs=} and {max_queue_size=} must be at least 1")
        self.max_num_running_reqs = max_num_seqs
        self.max_queue_size = max_queue_size
        self._waiting: WaitingQueue[Key] = WaitingQueue()
        self._running: dict[str, Key] = {}  # in the order in which they began
        self._wave_ids = itertools.count(1)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def waiting_by_key(self) -> dict[Key, int]:
        """How many requests of each key wait."""
        return self._waiting.counts

    @property
    def running_by_key(self) -> dict[Key, int]:
        """How many requests of each key run."""
        return dict(Counter(self._running.values()))

    @property
    def waiting_ids(self) -> list[str]:
        """The waiting requests, the first to go first."""
        return self._waiting.request_ids

    @property
    def running_ids(self) -> list[str]:
        return list(self._running)

    def add_request(self, request_id: str, key: Key, priority: int = 0) -> None:
        """Let a request wait for its turn; the smaller its priority, the earlier.

        Raises:
            QueueFullError: `max_queue_size` requests wait already.
            ValueError: a request of this id is here already.
        """
        if request_id in self._running or request_id in self._waiting:
            raise ValueError(f"request {request_id!r} was added twice")
        if self.num_waiting >= self.max_queue_size:
            raise QueueFullError(f"{self.num_waiting} requests wait already (max_queue_size): try again later")
        self._waiting.add(request_id, key, priority)

    @abstractmethod
    def schedule(self) -> Wave[Key] | None:
        """The requests that take the next step together; None when nothing is left."""

    def finish_requests(self, request_ids: Iterable[str]) -> None:
        """Forget requests that ended, however they ended, waiting or running; unknown ids are ignored."""
        for request_id in request_ids:
            if request_id in self._waiting:
                self._waiting.remove(request_id)
            else:
                self._running.pop(request_id, None)

    def _start(self, key: Key, most: int) -> None:
        """Let the first waiting requests of `key` run, at most `most`."""
        self._running.update(dict.fromkeys(self._waiting.take(key, most), key))
