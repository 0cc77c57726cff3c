"""Runs the scheduled requests on the pipeline: one denoising step at a time, or one whole forward."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

from triton_diffusion.adapters import PipelineAdapter, RequestState, StepwiseAdapter
from triton_diffusion.batch import DiffusionRequestBatch
from triton_diffusion.errors import TritonDiffusionError, as_error
from triton_diffusion.output import BatchRunnerOutput, DiffusionOutput

logger = logging.getLogger(__name__)
Result = TypeVar("Result")


class ModelRunner:
    """Holds the state of the running requests, and gives each request its own result or its own error.

    An error of one request (a prompt that cannot be encoded, latents that are not finite) is that request's alone.
    An error of a fused forward pass, running out of memory included, is tried again with each half of the
    requests, until only those that fail alone are left with it.
    """

    def __init__(self, adapter: PipelineAdapter) -> None:
        self.adapter = adapter
        self._states: dict[str, RequestState] = {}

    @property
    def num_live_states(self) -> int:
        """Requests between two steps."""
        return len(self._states)

    @torch.inference_mode()
    def execute(self, batch: DiffusionRequestBatch) -> BatchRunnerOutput:
        """Bring every request of `batch` one step further; the results of those that ended."""
        if isinstance(self.adapter, StepwiseAdapter):
            return self._execute_step(self.adapter, batch)
        return self._execute_forward(batch)

    def release(self, request_ids: Iterable[str]) -> None:
        """Forget the state of requests that go no further."""
        for request_id in request_ids:
            self._states.pop(request_id, None)

    def _execute_forward(self, batch: DiffusionRequestBatch) -> BatchRunnerOutput:
        began = time.monotonic()
        try:
            outputs = BatchRunnerOutput.from_forward(batch, self.adapter.forward(batch), self.adapter.name)
        except Exception as error:
            return BatchRunnerOutput(dict.fromkeys(batch.request_ids, _failed(error)))
        for output in outputs.values():
            output.stage_durations.setdefault("denoise", time.monotonic() - began)
        return outputs

    def _execute_step(self, adapter: StepwiseAdapter, batch: DiffusionRequestBatch) -> BatchRunnerOutput:
        ended: dict[str, DiffusionOutput] = {}

        # 1. Encode the newcomers
        for request in batch:
            if request.request_id not in self._states:
                with self._own_error(request.request_id, ended):
                    state = self._timed("encode", adapter.prepare_encode, request)
                    self._states[request.request_id] = state

        # 2. One fused step of all
        running = [self._states[name] for name in batch.request_ids if name in self._states]
        self._denoise(adapter, [state for state in running if not state.is_finished], ended)

        # 3. Decode those that are finished
        for state in running:
            request_id = state.request.request_id
            if state.is_finished and request_id not in ended:
                with self._own_error(request_id, ended):
                    self._timed("denoise", _synchronize, state)
                    output = self._timed("decode", adapter.post_decode, state)
                    output.stage_durations = state.stage_durations
                    ended[request_id] = output
        self.release(ended)
        return BatchRunnerOutput(ended, max_rows=sum(state.num_rows for state in running))

    def _denoise(
        self, adapter: StepwiseAdapter, states: list[RequestState], ended: dict[str, DiffusionOutput]
    ) -> None:
        if not states:
            return
        try:
            began = time.monotonic()
            predictions = adapter.denoise_step(states)
            for state, prediction in zip(states, predictions, strict=True):
                with self._own_error(state.request.request_id, ended):
                    adapter.step_scheduler(state, prediction)
            for state in states:
                _add_duration(state, "denoise", time.monotonic() - began)
            return
        except Exception as error:
            if len(states) == 1:
                ended[states[0].request.request_id] = _failed(error)
                return
            logger.warning("a step of %d requests failed (%s); trying each half", len(states), error)
        # Outside the except block: the traceback would keep the failed pass's tensors alive.
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        middle = len(states) // 2
        self._denoise(adapter, states[:middle], ended)
        self._denoise(adapter, states[middle:], ended)

    def _timed(self, stage: str, call: Callable[[Any], Result], argument: Any) -> Result:
        began = time.monotonic()
        result = call(argument)
        state = result if isinstance(result, RequestState) else argument
        _add_duration(state, stage, time.monotonic() - began)
        return result

    @contextmanager
    def _own_error(self, request_id: str, ended: dict[str, DiffusionOutput]) -> Iterator[None]:
        """An error inside ends this request, and no other."""
        try:
            yield
        except Exception as error:
            ended[request_id] = _failed(error)


def _synchronize(state: RequestState) -> None:
    """Wait for the queued steps, so that their time is not counted as the decoder's."""
    if state.latents.is_cuda:
        torch.cuda.synchronize(state.latents.device)


def _add_duration(state: RequestState, stage: str, seconds: float) -> None:
    state.stage_durations[stage] = state.stage_durations.get(stage, 0.0) + seconds


def _failed(error: Exception) -> DiffusionOutput:
    if not isinstance(error, TritonDiffusionError):
        logger.error("a request failed", exc_info=error)
    return DiffusionOutput(error=as_error(error))
