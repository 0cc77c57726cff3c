"""The engine: requests come in, waves run, every request is answered."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from triton_diffusion.batch import DiffusionRequestBatch
from triton_diffusion.errors import EngineStoppedError, QueueFullError, as_error
from triton_diffusion.model_runner import ModelRunner
from triton_diffusion.output import BatchRunnerOutput, DiffusionOutput
from triton_diffusion.receipt import Receipt
from triton_diffusion.reply import Reply
from triton_diffusion.request import OmniDiffusionRequest
from triton_diffusion.request_scheduler import RequestScheduler, Wave
from triton_diffusion.sampling_params_key import SamplingParamsKey

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class _Pending:
    """A request that waits or runs, and where its answer goes."""

    request: OmniDiffusionRequest
    reply: Reply


@dataclass
class _WaveRecord:
    """What the log and the receipts say about the running wave."""

    wave: Wave[SamplingParamsKey]
    started: float
    oldest_wait: float
    rows: int = 0
    completed: int = 0


class DiffusionEngine:
    """Runs requests in waves on a thread of its own; a second thread sends the answers.

    Args:
        runner: runs the scheduled requests; used by the engine's thread alone.
        scheduler: decides which requests run next.
    """

    def __init__(self, runner: ModelRunner, scheduler: RequestScheduler[SamplingParamsKey]) -> None:
        self.runner = runner
        self.scheduler = scheduler
        self._pending: dict[str, _Pending] = {}
        self._wave: _WaveRecord | None = None
        self._changed = threading.Condition()  # guards the scheduler, _pending and _stopping
        self._stopping = False
        # Encoding and sending pictures must not hold up the next forward pass.
        self._responder = ThreadPoolExecutor(1, thread_name_prefix="diffusion-responder")
        self._worker = threading.Thread(target=self._run, name="diffusion-engine", daemon=True)

    def start(self) -> None:
        self._worker.start()

    def add_requests(self, arrivals: Sequence[tuple[OmniDiffusionRequest, Reply]]) -> None:
        """Let requests wait for their turn, all at once so that they can run in one wave. Never raises."""
        with self._changed:
            for request, reply in arrivals:
                try:
                    self._add(request, reply)
                except Exception as error:
                    reply.fail(error)
            self._changed.notify()

    def shutdown(self) -> None:
        """Stop after the step that runs now; every request that is left is answered with an error."""
        with self._changed:
            self._stopping = True
            self._changed.notify()
        if self._worker.ident is not None:
            self._worker.join()
        self._fail(list(self._pending), EngineStoppedError("the model is being unloaded"))
        self._responder.shutdown(wait=True)

    def step(self) -> None:
        """Schedule, run, answer."""
        wave = self._schedule()
        if wave is None:
            return
        batch = DiffusionRequestBatch([self._pending[name].request for name in wave.request_ids])
        outputs = self.runner.execute(batch)
        self._answer(outputs)

    def _run(self) -> None:
        while self._wait_for_work():
            try:
                self.step()
            except Exception as error:  # a fault of ours: those that run are answered, the others go on
                logger.exception("a step of the engine failed")
                self._fail(self.scheduler.running_ids or list(self._pending), error)

    def _wait_for_work(self) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: self._stopping or self._pending)
            return not self._stopping

    def _add(self, request: OmniDiffusionRequest, reply: Reply) -> None:
        if self._stopping:
            raise EngineStoppedError("the model is being unloaded")
        key = self.runner.adapter.key(request)
        try:
            self.scheduler.add_request(request.request_id, key)
        except QueueFullError:
            # Requests whose clients are gone must not keep others out.
            self._drop_stopped(self.scheduler.waiting_ids)
            self.scheduler.add_request(request.request_id, key)
        self._pending[request.request_id] = _Pending(request, reply)

    def _schedule(self) -> Wave[SamplingParamsKey] | None:
        with self._changed:
            self._drop_stopped(self.scheduler.running_ids)
            if not self.scheduler.num_running:
                self._close_wave()
                self._drop_stopped(self.scheduler.waiting_ids)
            wave = self.scheduler.schedule()
            if wave is not None and self._wave is None:
                now = time.monotonic()
                oldest = min(self._pending[name].request.arrival_time for name in wave.request_ids)
                self._wave = _WaveRecord(wave, started=now, oldest_wait=now - oldest)
            return wave

    def _drop_stopped(self, request_ids: Iterable[str]) -> None:
        """Let out the requests that nobody waits for any more."""
        for request_id in request_ids:
            try:
                self._pending[request_id].request.raise_if_stopped()
            except Exception as error:
                self._fail([request_id], error)

    def _answer(self, outputs: BatchRunnerOutput) -> None:
        assert self._wave is not None
        self._wave.rows = max(self._wave.rows, outputs.max_rows)
        for request_id, output in outputs.items():
            if output.error is not None:
                self._fail([request_id], output.error)
            else:
                self._succeed(request_id, output)
        with self._changed:
            if not self.scheduler.num_running:
                self._close_wave()

    def _succeed(self, request_id: str, output: DiffusionOutput) -> None:
        record = self._wave
        assert record is not None
        pending = self._pending[request_id]
        receipt = Receipt.of(
            request_id,
            wave_id=record.wave.wave_id,
            wave_size=len(record.wave.request_ids),
            rows=record.rows,
            key=str(record.wave.key),
            sampling_params=pending.request.sampling_params,
            output=output,
            queue_seconds=record.started - pending.request.arrival_time,
        )
        record.completed += 1
        self._release(request_id)
        self._responder.submit(pending.reply.succeed, output, receipt)

    def _fail(self, request_ids: Iterable[str], error: Exception) -> None:
        for request_id in list(request_ids):
            pending = self._release(request_id)
            self._responder.submit(pending.reply.fail, as_error(error))

    def _release(self, request_id: str) -> _Pending:
        with self._changed:
            self.scheduler.finish_requests([request_id])
            self.runner.release([request_id])
            return self._pending.pop(request_id)

    def _close_wave(self) -> None:
        """Write the wave's line into the log."""
        record, self._wave = self._wave, None
        if record is None:
            return
        logger.info(
            "wave %d: %d requests (%d completed), %d rows, key [%s], waited %.1f ms, ran %.1f ms, %d waiting",
            record.wave.wave_id,
            len(record.wave.request_ids),
            record.completed,
            record.rows,
            record.wave.key,
            record.oldest_wait * 1000,
            (time.monotonic() - record.started) * 1000,
            self.scheduler.num_waiting,
        )
