"""Who is told what the engine does: the log, the metrics, the traces."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from queue import SimpleQueue
from typing import NamedTuple

from triton_diffusion.output import DiffusionOutput
from triton_diffusion.pending import PendingRequest
from triton_diffusion.reply import Reply
from triton_diffusion.sampling_params_key import SamplingParamsKey

logger = logging.getLogger(__name__)


class EngineState(NamedTuple):
    """What is in the engine at one moment.

    Args:
        waiting, running: the number of requests of each key.
        live_states: requests that have begun and not ended.
        remaining_steps: denoising steps that these still have to take.
    """

    waiting: Mapping[SamplingParamsKey, int]
    running: Mapping[SamplingParamsKey, int]
    live_states: int
    remaining_steps: int


class WaveStep(NamedTuple):
    """One step that the requests of a wave took together; of a class without steps, its whole `forward`.

    Args:
        rows: images of these requests.
        forward_rows: rows of each forward pass: up to twice the images in all, where each is evaluated with the
            negative prompt too.
    """

    wave_id: int
    requests: int
    rows: int
    forward_rows: Sequence[int]
    seconds: float


class EngineObserver:
    """Is told what happens to the requests of an engine, in that order and soon after it; this one does not care."""

    def engine_changed(self, state: EngineState) -> None:
        """Requests came, or a step is over."""

    def request_started(self, pending: PendingRequest) -> None:
        """The request waits no more: it is in the next step."""

    def wave_stepped(self, step: WaveStep) -> None:
        """A step was taken."""

    def request_ended(self, pending: PendingRequest, output: DiffusionOutput | None) -> None:
        """The request was answered: with `output`, or with `pending.reply.error`."""

    def request_refused(self, reply: Reply) -> None:
        """A request that never got into the engine was answered, with `reply.error`."""

    def close(self) -> None:
        """The engine has stopped."""


class Observers(EngineObserver):
    """Tells several observers, on a thread of its own, so that no step and no answer waits for them.

    One that fails harms neither a request nor the others.
    """

    def __init__(self, observers: Sequence[EngineObserver]) -> None:
        self._observers = observers
        self._news: SimpleQueue[Callable[[EngineObserver], None] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="diffusion-observers", daemon=True)
        self._thread.start()

    def engine_changed(self, state: EngineState) -> None:
        self._tell(lambda observer: observer.engine_changed(state))

    def request_started(self, pending: PendingRequest) -> None:
        self._tell(lambda observer: observer.request_started(pending))

    def wave_stepped(self, step: WaveStep) -> None:
        self._tell(lambda observer: observer.wave_stepped(step))

    def request_ended(self, pending: PendingRequest, output: DiffusionOutput | None) -> None:
        self._tell(lambda observer: observer.request_ended(pending, output))

    def request_refused(self, reply: Reply) -> None:
        self._tell(lambda observer: observer.request_refused(reply))

    def close(self) -> None:
        """Return when everything was told."""
        self._tell(lambda observer: observer.close())
        self._news.put(None)
        if self._thread is not None:
            self._thread.join()

    def _tell(self, call: Callable[[EngineObserver], None]) -> None:
        self._news.put(call)

    def _run(self) -> None:
        while (call := self._news.get()) is not None:
            for observer in self._observers:
                try:
                    call(observer)
                except Exception:
                    logger.exception("%s failed", type(observer).__name__)
