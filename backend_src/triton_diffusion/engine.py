"""The engine: requests come in, waves run, every request is answered."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from triton_diffusion.batch import DiffusionRequestBatch
from triton_diffusion.errors import EngineStoppedError, QueueFullError, TritonDiffusionError, as_error
from triton_diffusion.model_runner import ModelRunner, StepProgress
from triton_diffusion.observer import EngineObserver, EngineState, Observers, WaveStep
from triton_diffusion.output import BatchRunnerOutput, DiffusionOutput
from triton_diffusion.pending import PendingRequest
from triton_diffusion.receipt import Receipt
from triton_diffusion.reply import Reply
from triton_diffusion.request import OmniDiffusionRequest
from triton_diffusion.sampling_params_key import SamplingParamsKey
from triton_diffusion.scheduling import Scheduler, Wave
from triton_diffusion.wave_log import WaveLog

logger = logging.getLogger(__name__)

SWEEP_SECONDS = 0.1
"""How often the waiting requests are asked whether somebody still waits for them."""


def never() -> bool:
    """No, it must not stop."""
    return False


def nothing() -> None:
    """Nothing has to be done before the first request."""


class DiffusionEngine:
    """Runs requests on a thread of its own; a second thread sends the answers.

    Args:
        runner: runs the scheduled requests; used by the engine's thread alone.
        scheduler: decides which requests take the next step: the mode of the engine.
        observers: are told what happens.
        must_stop: asked between steps; once it says so, every request that is left is answered with an error.
    """

    def __init__(
        self,
        runner: ModelRunner,
        scheduler: Scheduler[SamplingParamsKey],
        observers: Sequence[EngineObserver] = (),
        must_stop: Callable[[], bool] = never,
    ) -> None:
        self.runner = runner
        self.scheduler = scheduler
        self.must_stop = must_stop
        self._observers = Observers([WaveLog(), *observers])
        self._pending: dict[str, PendingRequest] = {}
        self._next_sweep = 0.0
        self._changed = threading.Condition()  # guards the scheduler, _pending and _stopping
        self._stopping = False
        # Encoding and sending pictures must not hold up the next forward pass.
        self._responder = ThreadPoolExecutor(1, thread_name_prefix="diffusion-responder")
        # But when pictures are made faster than sent, they must not pile up.
        self._unsent = threading.BoundedSemaphore(2 * scheduler.max_num_running_reqs)
        self._worker: threading.Thread | None = None

    def start(self, first: Callable[[], None] = nothing) -> None:
        """Start the engine's thread, and return when `first` has run on it.

        What is compiled or captured for one thread may be of no use to another.

        Raises:
            Exception: that of `first`; the engine does not run then.
        """
        self._observers.start()
        began: Future[None] = Future()
        self._worker = threading.Thread(target=self._run, args=(first, began), name="diffusion-engine", daemon=True)
        self._worker.start()
        began.result()

    def add_requests(self, arrivals: Sequence[tuple[OmniDiffusionRequest, Reply]]) -> None:
        """Let requests wait for their turn, all at once so that they can run in one wave. Never raises."""
        with self._changed:
            for request, reply in arrivals:
                try:
                    self._add(request, reply)
                except Exception as error:
                    self.refuse(reply, error)
            self._observe()
            self._changed.notify()

    def refuse(self, reply: Reply, error: Exception) -> None:
        """Answer a request that does not get in. Never raises."""
        if reply.fail(error):
            self._observers.request_refused(reply)

    def progress(self) -> dict[str, StepProgress]:
        """How far every request is, by request id; those that wait are at step 0."""
        with self._changed:
            waiting = {
                name: StepProgress(0, pending.request.sampling_params.num_inference_steps or 0)
                for name, pending in self._pending.items()
            }
        return {**waiting, **self.runner.progress()}

    def shutdown(self) -> None:
        """Stop after the step that runs now; every request that is left is answered with an error."""
        with self._changed:
            self._stopping = True
            self._changed.notify()
        if self._worker is not None:
            self._worker.join()
        self._fail(list(self._pending), EngineStoppedError("the model is being unloaded"))
        self._responder.shutdown(wait=True)
        self._observers.close()

    def step(self) -> None:
        """Schedule, run, answer."""
        wave = self._schedule()
        if wave is not None:
            outputs = self.runner.execute(DiffusionRequestBatch([self._pending[n].request for n in wave.request_ids]))
            self._note_step(wave, outputs)
            for request_id, output in outputs.items():
                self._answer(request_id, output)
        for request_id, output in self.runner.decode():
            self._answer(request_id, output)

    def _run(self, first: Callable[[], None], began: Future[None]) -> None:
        try:
            first()
        except BaseException as error:
            began.set_exception(error)
            return
        began.set_result(None)
        while self._wait_for_work():
            try:
                if self.must_stop():
                    self._fail(list(self._pending), EngineStoppedError("the server is shutting down"))
                else:
                    self.step()
            except Exception as error:  # a fault of ours: those that run are answered, the others go on
                logger.exception("a step of the engine failed")
                self._fail(self.scheduler.running_ids or list(self._pending), error)
            self._observe()

    def _observe(self) -> None:
        with self._changed:
            state = EngineState(
                waiting=self.scheduler.waiting_by_key,
                running=self.scheduler.running_by_key,
                live_states=self.runner.num_live_states,
                remaining_steps=sum(one.steps - one.step for one in self.runner.progress().values()),
            )
            self._observers.engine_changed(state)

    def _wait_for_work(self) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: self._stopping or self._pending)
            return not self._stopping

    def _add(self, request: OmniDiffusionRequest, reply: Reply) -> None:
        if self._stopping:
            raise EngineStoppedError("the model is being unloaded")
        key = self.runner.adapter.key(request)
        try:
            self.scheduler.add_request(request.request_id, key, request.priority or 0)
        except QueueFullError:
            # Requests whose clients are gone must not keep others out.
            self._sweep()
            self.scheduler.add_request(request.request_id, key, request.priority or 0)
        self._pending[request.request_id] = PendingRequest(request, reply, key)

    def _schedule(self) -> Wave[SamplingParamsKey] | None:
        with self._changed:
            self._sweep()
            wave = self.scheduler.schedule()
            # Those that were let in just now may be cancelled already, and must not be encoded.
            while wave is not None and self._drop_stopped(wave.request_ids):
                wave = self.scheduler.schedule()
            if wave is not None:
                self._start(wave)
            return wave

    def _start(self, wave: Wave[SamplingParamsKey]) -> None:
        for request_id in wave.request_ids:
            pending = self._pending[request_id]
            if not pending.has_started:
                pending.start(wave)
                self._observers.request_started(pending)

    def _sweep(self) -> None:
        """Now and then, answer the waiting requests that were cancelled or are too late."""
        began = time.monotonic()
        if began >= self._next_sweep:
            self._drop_stopped(self.scheduler.waiting_ids)
            ended = time.monotonic()
            self._next_sweep = ended + max(SWEEP_SECONDS, 10 * (ended - began))  # never more than a tenth of the time

    def _drop_stopped(self, request_ids: Iterable[str]) -> list[str]:
        """Let out, and return, the requests that nobody waits for any more."""
        dropped = []
        for request_id in request_ids:
            try:
                self._pending[request_id].request.raise_if_stopped()
            except Exception as error:
                self._fail([request_id], error)
                dropped.append(request_id)
        return dropped

    def _note_step(self, wave: Wave[SamplingParamsKey], outputs: BatchRunnerOutput) -> None:
        requests = len(outputs.stepped)
        for request_id in outputs.stepped:
            self._pending[request_id].took_step(wave, requests, outputs.rows)
        if requests:
            step = WaveStep(wave.wave_id, requests, outputs.rows, outputs.forward_rows, outputs.seconds)
            self._observers.wave_stepped(step)
        for request_id in outputs.denoised:
            self._pending[request_id].is_denoised = True
        with self._changed:
            # A request that only has to be decoded makes room for another one.
            self.scheduler.finish_requests(outputs.denoised)

    def _answer(self, request_id: str, output: DiffusionOutput) -> None:
        if output.error is not None:
            self._fail([request_id], output.error)
            return
        pending = self._pending[request_id]
        receipt = pending.receipt(output)
        self._release(request_id)
        self._unsent.acquire()
        self._responder.submit(self._send, pending, output, receipt)

    def _send(self, pending: PendingRequest, output: DiffusionOutput, receipt: Receipt) -> None:
        began = time.monotonic()
        try:
            is_answer = pending.reply.succeed(output, receipt)
        finally:
            self._unsent.release()
        if is_answer:
            pending.answered = time.monotonic()
            pending.timeline.add("answer", pending.answered - began)
            self._observers.request_ended(pending, output)

    def _fail(self, request_ids: Iterable[str], error: Exception) -> None:
        for request_id in list(request_ids):
            steps_left = self._steps_left(request_id)
            pending = self._release(request_id)
            pending.steps_left = steps_left
            if not pending.has_started:
                pending.stop_waiting()
            self._responder.submit(self._send_error, pending, as_error(error))

    def _send_error(self, pending: PendingRequest, error: TritonDiffusionError) -> None:
        if pending.reply.fail(error):
            pending.answered = time.monotonic()
            self._observers.request_ended(pending, None)

    def _steps_left(self, request_id: str) -> int:
        pending = self._pending[request_id]
        if pending.is_denoised:
            return 0
        progress = self.runner.progress().get(request_id) if pending.has_started else None
        if progress is None:
            return pending.request.sampling_params.num_inference_steps or 0
        return progress.steps - progress.step

    def _release(self, request_id: str) -> PendingRequest:
        with self._changed:
            self.scheduler.finish_requests([request_id])
            self.runner.release([request_id])
            return self._pending.pop(request_id)
