"""Request-level batching: a wave runs to its end, then the next one is formed."""

from __future__ import annotations

from collections.abc import Hashable
from typing import TypeVar

from triton_diffusion.scheduling.scheduler import Scheduler, Wave

Key = TypeVar("Key", bound=Hashable)


class RequestScheduler(Scheduler[Key]):
    """Waves of one key: the key whose oldest request has waited longest goes next.

    It goes with up to `max_num_running_reqs` of its requests, oldest first. So requests that Triton queued in
    alternation still run together, and no key starves: before a request runs, at most as many waves run as
    requests waited when it arrived.
    """

    _wave_id = 0

    def schedule(self) -> Wave[Key] | None:
        """What is left of the running wave, else a new wave; None when nothing is left."""
        if not self._running:
            key = self._waiting.first_key()
            if key is None:
                return None
            self._start(key, self.max_num_running_reqs)
            self._wave_id = next(self._wave_ids)
        running_key = next(iter(self._running.values()))
        return Wave(self._wave_id, running_key, tuple(self._running))
