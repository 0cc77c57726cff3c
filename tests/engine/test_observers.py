"""Observers of the engine: what they are told, and that a broken one harms nobody."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from tests.engine.fakes import CountingAdapter, RecordedReply, fake_request
from triton_diffusion.engine import DiffusionEngine
from triton_diffusion.model_runner import ModelRunner
from triton_diffusion.observer import EngineObserver, EngineState, WaveStep
from triton_diffusion.outcome import outcome_of, reason_of
from triton_diffusion.output import DiffusionOutput
from triton_diffusion.pending import PendingRequest
from triton_diffusion.reply import Reply
from triton_diffusion.request_tracer import RequestTracer
from triton_diffusion.scheduling import RequestScheduler

Start = Callable[..., tuple[DiffusionEngine, CountingAdapter]]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts engines with observers, and stops them after the test."""
    engines = []

    def start_engine(*observers: EngineObserver) -> tuple[DiffusionEngine, CountingAdapter]:
        adapter = CountingAdapter()
        engine = DiffusionEngine(ModelRunner(adapter), RequestScheduler(8, max_queue_size=5), observers)
        engines.append(engine)
        engine.start()
        return engine, adapter

    yield start_engine
    for engine in engines:
        engine.shutdown()


class Recorder(EngineObserver):
    """Remembers what it was told."""

    def __init__(self) -> None:
        self.states: list[EngineState] = []
        self.steps: list[WaveStep] = []
        self.started: list[PendingRequest] = []
        self.ended: list[PendingRequest] = []
        self.refused: list[Reply] = []

    def engine_changed(self, state: EngineState) -> None:
        self.states.append(state)

    def request_started(self, pending: PendingRequest) -> None:
        self.started.append(pending)

    def wave_stepped(self, step: WaveStep) -> None:
        self.steps.append(step)

    def request_ended(self, pending: PendingRequest, output: DiffusionOutput | None) -> None:
        self.ended.append(pending)

    def request_refused(self, reply: Reply) -> None:
        self.refused.append(reply)

    def outcomes(self) -> dict[str, str]:
        return {one.request.prompt: outcome_of(one.reply.error) for one in self.ended}


class Broken(EngineObserver):
    """Fails whenever it is told something."""

    def __getattribute__(self, name: str) -> object:
        if name in vars(EngineObserver):
            raise RuntimeError(f"{name} is broken")
        return super().__getattribute__(name)


def send(engine: DiffusionEngine, *prompts: str, **params: int) -> list[RecordedReply]:
    replies = [RecordedReply() for _ in prompts]
    arrivals = [(fake_request(prompt, reply, **params), reply) for prompt, reply in zip(prompts, replies, strict=True)]
    engine.add_requests(arrivals)
    return replies


def test_each_request_is_told_of_once_by_its_outcome(start: Start) -> None:
    recorder = Recorder()
    engine, _ = start(recorder)
    replies = send(engine, "good", "bad encode", "bad decode", "nan", num_inference_steps=4)
    for reply in replies:
        reply.wait()
    engine.shutdown()  # everything was told by then
    assert recorder.outcomes() == {
        "good": "completed",
        "bad encode": "failed",
        "bad decode": "failed",
        "nan": "failed",
    }
    assert len(recorder.ended) == len(recorder.started) == 4
    assert [(step.wave_id, step.requests, step.rows, step.forward_rows) for step in recorder.steps] == [
        (1, 3, 3, [3])
    ] * 4
    assert recorder.states[0].waiting == {recorder.started[0].key: 4}
    assert (recorder.states[-1].waiting, recorder.states[-1].running) == ({}, {})
    assert (recorder.states[-1].live_states, recorder.states[-1].remaining_steps) == (0, 0)
    assert [list(one.timeline) for one in recorder.ended if one.request.prompt == "good"] == [
        ["waiting", "encode", "denoise", "decode", "answer"]
    ]


def test_the_steps_that_a_stopped_request_did_not_take(start: Start) -> None:
    recorder = Recorder()
    engine, adapter = start(recorder)
    arrived, go_on = threading.Event(), threading.Event()

    def hold() -> None:
        arrived.set()
        assert go_on.wait(10)

    adapter.before_step = hold
    (leaves,) = send(engine, "leaves", num_inference_steps=10)
    assert arrived.wait(10)
    (never_ran,) = send(engine, "never ran", height=16, num_inference_steps=7)
    leaves.cancelled = never_ran.cancelled = True
    go_on.set()  # the step that runs is taken
    leaves.wait()
    never_ran.wait()
    engine.shutdown()
    assert recorder.outcomes() == {"leaves": "cancelled", "never ran": "cancelled"}
    assert {one.request.prompt: one.steps_left for one in recorder.ended} == {"leaves": 9, "never ran": 7}


def test_a_request_that_does_not_get_in_is_refused(start: Start) -> None:
    recorder = Recorder()
    engine, _ = start(recorder)
    replies = send(engine, *["good"] * 6)  # max_queue_size is 5
    engine.refuse(replies[5], ValueError("answered already: not told again"))
    for reply in replies:
        reply.wait()
    engine.shutdown()
    assert [(outcome_of(reply.error), reason_of(reply.error)) for reply in recorder.refused] == [
        ("refused", "queue_full_error")
    ]
    assert len(recorder.ended) == 5


def test_a_broken_observer_harms_neither_requests_nor_the_other_observers(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    recorder = Recorder()
    engine, _ = start(Broken(), recorder)
    for reply in send(engine, "good", "good"):
        assert isinstance(reply.wait(), DiffusionOutput)
    engine.shutdown()
    assert [one.request.prompt for one in recorder.ended] == ["good", "good"]
    assert any("Broken failed" in record.message for record in caplog.records)


def test_spans_of_the_requests_of_a_wave(start: Start) -> None:
    exporter = InMemorySpanExporter()
    engine, _ = start(RequestTracer("model", "instance", SimpleSpanProcessor(exporter)))
    for reply in send(engine, "good", "bad decode", "bad encode"):
        reply.wait()
    engine.shutdown()
    spans = exporter.get_finished_spans()
    for root in (span for span in spans if span.name == "diffusion"):
        assert root.context is not None
        children = [span for span in spans if span.parent is not None and span.parent.span_id == root.context.span_id]
        assert root.attributes is not None
        failed = root.attributes["triton_diffusion.reason"] == "execution_error"
        assert root.status.is_ok is not failed
        stages = [span.name for span in children]
        assert stages[0] == "waiting"
        assert (stages[-1] == "answer") is not failed
    assert sum(span.name == "diffusion" for span in spans) == 3
