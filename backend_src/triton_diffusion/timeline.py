"""When the stages of a request were."""

from __future__ import annotations

import time
from typing import NamedTuple


class Stage(NamedTuple):
    """A stage that a request has gone through.

    Args:
        began, ended: `time.monotonic()`.
        seconds: spent in it; less than from `began` to `ended` when other things were done in between.
    """

    began: float
    ended: float
    seconds: float


class Timeline(dict[str, Stage]):
    """The stages of one request by name, in order: `waiting`, `encode`, `denoise`, `decode`, `answer`."""

    def add(self, stage: str, seconds: float) -> None:
        """Note that the request has spent `seconds` in `stage`, until now."""
        ended = time.monotonic()
        before = self.get(stage)
        if before is None:
            self[stage] = Stage(ended - seconds, ended, seconds)
        else:
            self[stage] = Stage(before.began, ended, before.seconds + seconds)

    @property
    def durations(self) -> dict[str, float]:
        """The seconds spent in each stage."""
        return {name: stage.seconds for name, stage in self.items()}
