"""One line in the log for each wave."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from triton_diffusion.observer import EngineObserver
from triton_diffusion.output import DiffusionOutput
from triton_diffusion.pending import PendingRequest

logger = logging.getLogger(__name__)


@dataclass
class _Line:
    """What is known of the requests that began together."""

    key: str
    began: float
    requests: int = 0
    left: int = 0
    completed: int = 0
    rows: int = 0
    longest_wait: float = 0.0


class WaveLog(EngineObserver):
    """Logs the requests that began together, when the last of them was answered."""

    def __init__(self) -> None:
        self._open: dict[int, _Line] = {}

    def request_started(self, pending: PendingRequest) -> None:
        waiting = pending.timeline["waiting"]
        line = self._open.setdefault(pending.joined_at_wave, _Line(str(pending.key), waiting.ended))
        line.requests += 1
        line.left += 1
        line.longest_wait = max(line.longest_wait, waiting.seconds)

    def request_ended(self, pending: PendingRequest, output: DiffusionOutput | None) -> None:
        if not pending.has_started:
            return
        line = self._open[pending.joined_at_wave]
        line.left -= 1
        line.completed += pending.reply.error is None
        line.rows = max(line.rows, *pending.rows_per_step, 0)
        if line.left == 0:
            del self._open[pending.joined_at_wave]
            logger.info(
                "wave %d: %d requests (%d completed), %d rows, key [%s], waited %.1f ms, ran %.1f ms",
                pending.joined_at_wave,
                line.requests,
                line.completed,
                line.rows,
                line.key,
                line.longest_wait * 1000,
                (pending.answered - line.began) * 1000,
            )
