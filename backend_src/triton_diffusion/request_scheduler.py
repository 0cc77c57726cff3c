"""Which requests run next: pure bookkeeping, with no thread, no clock, no torch and no Triton in it."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

from triton_diffusion.errors import QueueFullError

Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True)
class Wave(Generic[Key]):
    """Requests of one key that run together, oldest first."""

    wave_id: int
    key: Key
    request_ids: tuple[str, ...]


class RequestScheduler(Generic[Key]):
    """Request-level batching: a wave of one key runs to its end, then the next wave is formed.

    The key whose oldest request has waited longest goes next, with up to `max_num_running_reqs` of its requests,
    oldest first. So requests that Triton queued in alternation still run together, and no key starves: before a
    request runs, at most as many waves run as requests arrived before it.

    Args:
        max_num_seqs: the most requests of one wave; config.pbtxt's max_batch_size.
        max_queue_size: the most requests that may wait.
    """

    def __init__(self, max_num_seqs: int, max_queue_size: int) -> None:
        if max_num_seqs < 1 or max_queue_size < 1:
            raise ValueError(f"{max_num_seqs=} and {max_queue_size=} must be at least 1")
        self.max_num_running_reqs = max_num_seqs
        self.max_queue_size = max_queue_size
        self._waiting: dict[Key, OrderedDict[str, int]] = {}
        self._key_of: dict[str, Key] = {}
        self._running: OrderedDict[str, None] = OrderedDict()
        self._wave: Wave[Key] | None = None
        self._arrivals = itertools.count()
        self._wave_ids = itertools.count(1)

    @property
    def num_waiting(self) -> int:
        return len(self._key_of) - len(self._running)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def waiting_ids(self) -> list[str]:
        """The waiting requests, oldest first."""
        arrivals = {name: number for queue in self._waiting.values() for name, number in queue.items()}
        return sorted(arrivals, key=arrivals.__getitem__)

    @property
    def running_ids(self) -> list[str]:
        return list(self._running)

    def add_request(self, request_id: str, key: Key) -> None:
        """Let a request wait for its turn.

        Raises:
            QueueFullError: `max_queue_size` requests wait already.
            ValueError: a request of this id is here already.
        """
        if request_id in self._key_of:
            raise ValueError(f"request {request_id!r} was added twice")
        if self.num_waiting >= self.max_queue_size:
            raise QueueFullError(f"{self.num_waiting} requests wait already (max_queue_size): try again later")
        self._key_of[request_id] = key
        self._waiting.setdefault(key, OrderedDict())[request_id] = next(self._arrivals)

    def schedule(self) -> Wave[Key] | None:
        """What runs now: the rest of the running wave, else a new wave; None when nothing is left."""
        if self._running:
            assert self._wave is not None
            return Wave(self._wave.wave_id, self._wave.key, tuple(self._running))
        if not self._waiting:
            return None
        key = min(self._waiting, key=lambda key: next(iter(self._waiting[key].values())))
        queue = self._waiting[key]
        request_ids = tuple(itertools.islice(queue, self.max_num_running_reqs))
        for request_id in request_ids:
            del queue[request_id]
        if not queue:
            del self._waiting[key]
        self._running = OrderedDict.fromkeys(request_ids)
        self._wave = Wave(next(self._wave_ids), key, request_ids)
        return self._wave

    def finish_requests(self, request_ids: Iterable[str]) -> None:
        """Forget requests that ended, however they ended, waiting or running; unknown ids are ignored."""
        for request_id in request_ids:
            key = self._key_of.pop(request_id, None)
            if key is None:
                continue
            if request_id in self._running:
                del self._running[request_id]
                continue
            queue = self._waiting[key]
            del queue[request_id]
            if not queue:
                del self._waiting[key]
