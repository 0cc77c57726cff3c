"""Runs the scheduled requests on the pipeline: one denoising step at a time, or one whole forward."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, TypeVar

import numpy as np
import torch

from triton_diffusion.adapters import PipelineAdapter, RequestState, StepwiseAdapter
from triton_diffusion.batch import DiffusionRequestBatch
from triton_diffusion.errors import CollateError, PipelineOutputError, TritonDiffusionError, as_error
from triton_diffusion.lora import LoraSelection
from triton_diffusion.output import BatchRunnerOutput, DiffusionOutput, check_output

logger = logging.getLogger(__name__)
Result = TypeVar("Result")


class StepProgress(NamedTuple):
    """Denoising steps that a request has taken, of all that it takes."""

    step: int
    steps: int


class ModelRunner:
    """Holds the state of the running requests, and gives each request its own result or its own error.

    An error of one request (a prompt that cannot be encoded, latents that are not finite) is that request's alone.
    A fused step that fails, for lack of memory or otherwise, is tried again with each half of the requests, until
    only those that fail alone are left with the error. A `forward` of a class without steps is not tried again.

    Args:
        tries_halves: otherwise a fused step that fails gives all of its requests the error.
    """

    def __init__(self, adapter: PipelineAdapter, *, tries_halves: bool = True) -> None:
        self.adapter = adapter
        self.tries_halves = tries_halves
        self._states: dict[str, RequestState] = {}

    @property
    def num_live_states(self) -> int:
        """Requests that have begun and not ended."""
        return len(self._states)

    def progress(self) -> dict[str, StepProgress]:
        """The steps that each live request has taken, and has to take in all."""
        return {
            request_id: StepProgress(state.step_index, len(state.timesteps))
            for request_id, state in list(self._states.items())
        }

    @torch.inference_mode()
    def execute(self, batch: DiffusionRequestBatch) -> BatchRunnerOutput:
        """Bring every request of `batch` one step further; the results of those that ended.

        While other requests take steps, at most one newcomer is encoded, so that these wait for no more than that
        between two steps; the rest have their turn next time. Requests that took their last step are `decode`d.
        """
        if isinstance(self.adapter, StepwiseAdapter):
            return self._execute_step(self.adapter, batch)
        return self._execute_forward(batch)

    def decode(self) -> Iterator[tuple[str, DiffusionOutput]]:
        """Decode requests that have taken all their steps, and yield each result as soon as it is there.

        While other requests take steps, it is `decode_batch_size` rows (and more only when requests finish faster
        than that); the rest have their turn next time.
        """
        is_denoising = self._is_denoising()
        finished = [state for state in self._states.values() if state.is_finished]
        if is_denoising:
            finished = finished[: 1 + len(finished) // self.adapter.config.max_num_seqs]
        for state in finished:
            output = self._decode_part(state)
            while output is None and not is_denoising:
                output = self._decode_part(state)
            if output is not None:
                self.release([state.request.request_id])
                yield state.request.request_id, output

    def release(self, request_ids: Iterable[str]) -> None:
        """Forget the state of requests that go no further."""
        for request_id in request_ids:
            self._states.pop(request_id, None)

    def _execute_forward(self, batch: DiffusionRequestBatch) -> BatchRunnerOutput:
        began = time.monotonic()
        try:
            self.adapter.loras.before_encoding(LoraSelection.of(batch.sampling_params))
            outputs = BatchRunnerOutput.from_forward(batch, self.adapter.forward(batch), type(self.adapter).__name__)
        except Exception as error:
            ids = batch.request_ids
            outputs = BatchRunnerOutput(dict.fromkeys(ids, _failed(error)), stepped=ids, denoised=ids)
        outputs.seconds = time.monotonic() - began
        for request in batch:
            request.timeline.add("denoise", outputs.seconds)
        return outputs

    def _execute_step(self, adapter: StepwiseAdapter, batch: DiffusionRequestBatch) -> BatchRunnerOutput:
        ended: dict[str, DiffusionOutput] = {}

        # 1. Encode newcomers
        newcomers = [request for request in batch if request.request_id not in self._states]
        for request in newcomers[:1] if self._is_denoising() else newcomers:
            with self._own_error(request.request_id, ended):
                began = time.monotonic()
                state = adapter.encode_request(request)
                if not isinstance(state, RequestState):
                    raise PipelineOutputError(
                        f"{type(adapter).__name__}.prepare_encode must return a RequestState; it returned "
                        f"{type(state).__name__}"
                    )
                _add_duration(state, "encode", time.monotonic() - began)
                self._join(state)

        # 2. One fused step of all
        states = [self._states[name] for name in batch.request_ids if name in self._states]
        began = time.monotonic()
        adapter.forward_rows.clear()
        self._denoise(adapter, states, ended)
        self.release(ended)
        denoised = [state.request.request_id for state in states if state.is_finished]
        return BatchRunnerOutput(
            ended,
            stepped=[state.request.request_id for state in states],
            denoised=denoised,
            rows=sum(state.num_rows for state in states),
            forward_rows=tuple(adapter.forward_rows),
            seconds=time.monotonic() - began,
        )

    def _is_denoising(self) -> bool:
        return any(not state.is_finished for state in self._states.values())

    def _join(self, state: RequestState) -> None:
        """Let an encoded request run; all live latents have one dtype, as a fused pass needs it."""
        for other in self._states.values():
            if other.latents.dtype != state.latents.dtype:
                raise CollateError(f"latents of {state.latents.dtype} cannot join those of {other.latents.dtype}")
        self._states[state.request.request_id] = state

    @torch.inference_mode()
    def _decode_part(self, state: RequestState) -> DiffusionOutput | None:
        """Decode some more rows of a finished request; its output, or None while rows are left."""
        adapter = self.adapter
        assert isinstance(adapter, StepwiseAdapter)
        try:
            state.request.raise_if_stopped()
            self._timed("denoise", _synchronize, state)
            begin = sum(len(part) for part in state.decoded)
            rows = dataclasses.replace(state, latents=state.latents[begin : begin + adapter.config.decode_batch_size])
            output = self._timed("decode", adapter.post_decode, rows)
            pixels = check_output(output, f"{type(adapter).__name__}.post_decode must return a DiffusionOutput; it")
            if pixels is None:
                return output
            state.decoded.append(pixels)
        except Exception as error:
            return _failed(error)
        if begin + rows.num_rows < state.num_rows:
            return None
        durations = state.request.timeline.durations
        return dataclasses.replace(output, output=np.concatenate(state.decoded), stage_durations=durations)

    def _denoise(
        self, adapter: StepwiseAdapter, states: list[RequestState], ended: dict[str, DiffusionOutput]
    ) -> None:
        if not states:
            return
        try:
            began = time.monotonic()
            adapter.loras.before_step([state.lora for state in states])
            predictions = adapter.denoise_step(states)
            if not isinstance(predictions, Sequence) or len(predictions) != len(states):  # before any state changes
                raise PipelineOutputError(
                    f"{type(adapter).__name__}.denoise_step must return a list of {len(states)} tensors, one for each "
                    "request"
                )
            for state, prediction in zip(states, predictions, strict=True):
                with self._own_error(state.request.request_id, ended):
                    adapter.step_scheduler(state, prediction)
            for state in states:
                _add_duration(state, "denoise", time.monotonic() - began)
            return
        except Exception as error:
            if len(states) == 1 or not self.tries_halves:
                ended.update(dict.fromkeys((state.request.request_id for state in states), _failed(error)))
                return
            logger.warning("a step of %d requests failed (%s); trying each half", len(states), error)
        # Outside the except block: the traceback would keep the failed pass's tensors alive.
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        middle = len(states) // 2
        self._denoise(adapter, states[:middle], ended)
        self._denoise(adapter, states[middle:], ended)

    def _timed(self, stage: str, call: Callable[[RequestState], Result], state: RequestState) -> Result:
        began = time.monotonic()
        result = call(state)
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
    state.request.timeline.add(stage, seconds)


def _failed(error: Exception) -> DiffusionOutput:
    if not isinstance(error, TritonDiffusionError):
        logger.error("a request failed", exc_info=error)
    return DiffusionOutput(error=as_error(error))
