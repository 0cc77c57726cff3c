"""Step-wise continuous batching: requests join and leave between any two steps."""

from __future__ import annotations

from collections.abc import Hashable
from typing import TypeVar

from triton_diffusion.scheduling.scheduler import Scheduler, Wave

Key = TypeVar("Key", bound=Hashable)

PATIENCE = 24
"""Steps; as many as a usual request takes, so that rooms of one key are left together where that is soon."""


class StepScheduler(Scheduler[Key]):
    """Before every step, lets waiting requests in and chooses the key that takes it.

    Who joins: the key whose oldest request has waited longest, as many of its requests as there is room for; while
    that one cannot join, nobody who came later does, so nobody starves. Requests of a key that runs already join as
    soon as there is room for one. A further key is let in only with as many requests as fill half the room, or all
    of its own if they are fewer: it takes steps of its own from then on, and those should be full ones. After
    PATIENCE steps it is let in with as many as there is room for, so that it does not wait for the end of long ones.

    Who steps: the running keys in turn, each with all of its requests; a key that was just let in goes before the one
    that stepped last.
    """

    def __init__(self, max_num_seqs: int, max_queue_size: int) -> None:
        super().__init__(max_num_seqs, max_queue_size)
        # Of each running key: the step since which it has waited for its turn, and whether it took that step.
        self._held_back = 0  # steps for which the first waiting key was not let in though there was room
        self._waits_since: dict[Key, tuple[int, bool]] = {}

    def schedule(self) -> Wave[Key] | None:
        """The next step: all running requests of the key whose turn it is; None when nothing is left."""
        self._let_in()
        if not self._running:
            return None
        wave_id = next(self._wave_ids)
        self._waits_since = {
            key: self._waits_since.get(key, (wave_id - 1, False)) for key in dict.fromkeys(self._running.values())
        }
        key = min(self._waits_since, key=self._waits_since.__getitem__)
        self._waits_since[key] = (wave_id, True)
        request_ids = tuple(request_id for request_id, own_key in self._running.items() if own_key == key)
        return Wave(wave_id, key, request_ids)

    def _let_in(self) -> None:
        while (key := self._waiting.first_key()) is not None:
            room = self.max_num_running_reqs - len(self._running)
            half = (self.max_num_running_reqs + 1) // 2
            needed = min(half, self._waiting.count(key))
            if key in self._running.values() or self._held_back >= PATIENCE:
                needed = 1
            if room < needed:
                self._held_back += room > 0
                return
            self._start(key, room)
            self._held_back = 0
