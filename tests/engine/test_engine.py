"""The engine: every request gets exactly one answer, as soon as it can have it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engine.fakes import PATIENCE, CountingAdapter, RecordedReply, fake_request
from triton_diffusion.embedded.server import STOP_FILE
from triton_diffusion.engine import DiffusionEngine
from triton_diffusion.errors import (
    DeadlineExceededError,
    EngineStoppedError,
    ExecutionError,
    QueueFullError,
    RequestCancelledError,
)
from triton_diffusion.model_runner import ModelRunner
from triton_diffusion.output import DiffusionOutput
from triton_diffusion.receipt import Receipt
from triton_diffusion.scheduling import RequestScheduler
from triton_diffusion.serving import must_stop

Start = Callable[..., DiffusionEngine]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts engines, and stops them after the test."""
    engines = []

    def start_engine(adapter: CountingAdapter, max_num_seqs: int = 8, max_queue_size: int = 100) -> DiffusionEngine:
        engine = DiffusionEngine(ModelRunner(adapter), RequestScheduler(max_num_seqs, max_queue_size))
        engines.append(engine)
        engine.start()
        return engine

    yield start_engine
    for engine in engines:
        engine.shutdown()


def add(engine: DiffusionEngine, *prompts: str, deadline: float | None = None, **params: int) -> list[RecordedReply]:
    replies = [RecordedReply() for _ in prompts]
    requests = [
        fake_request(prompt, reply, deadline, **params) for prompt, reply in zip(prompts, replies, strict=True)
    ]
    engine.add_requests(list(zip(requests, replies, strict=True)))
    return replies


class Gate:
    """Holds the engine's thread before each step until the test lets it go on."""

    def __init__(self, adapter: CountingAdapter) -> None:
        self._arrived, self._open = threading.Semaphore(0), threading.Semaphore(0)
        self._is_off = False
        adapter.before_step = self._pass

    def _pass(self) -> None:
        if not self._is_off:
            self._arrived.release()
            self._open.acquire(timeout=2 * PATIENCE)

    def wait_for_step(self) -> None:
        assert self._arrived.acquire(timeout=PATIENCE)

    def let_one_step_pass(self) -> None:
        self._open.release()

    def remove(self) -> None:
        self._is_off = True
        self._open.release()


def test_requests_that_arrive_together_run_together(start: Start) -> None:
    adapter = CountingAdapter()
    replies = add(start(adapter), "a", "b", "c", num_inference_steps=2)
    outputs = [reply.wait() for reply in replies]
    assert adapter.waves == [["a", "b", "c"]] * 2
    assert all(isinstance(output, DiffusionOutput) for output in outputs)
    receipts = [reply.receipt for reply in replies]
    assert [(receipt.wave_id, receipt.wave_size, receipt.rows) for receipt in receipts if receipt] == [(1, 3, 3)] * 3


def test_what_arrives_in_alternation_is_merged(start: Start) -> None:
    adapter = CountingAdapter()
    gate = Gate(adapter)
    engine = start(adapter)
    add(engine, "first", num_inference_steps=1)
    gate.wait_for_step()
    for number in range(6):  # one at a time, as Triton's queue would hand them over
        add(engine, f"{number}", height=(8, 16)[number % 2], num_inference_steps=1)
    gate.remove()
    engine_is_idle(engine)
    assert adapter.waves == [["first"], ["0", "2", "4"], ["1", "3", "5"]]


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def engine_is_idle(engine: DiffusionEngine) -> None:
    wait_until(lambda: not engine.progress())


def test_a_short_request_is_answered_before_the_wave_ends(start: Start) -> None:
    adapter = CountingAdapter()
    gate = Gate(adapter)
    engine = start(adapter)
    long, short = RecordedReply(), RecordedReply()
    engine.add_requests(
        [(fake_request("long", num_inference_steps=3), long), (fake_request("short", num_inference_steps=1), short)]
    )
    gate.wait_for_step()
    gate.let_one_step_pass()
    short.wait()
    assert not long.is_answered
    gate.remove()
    long.wait()


def test_a_cancelled_request_leaves_at_the_next_step(start: Start) -> None:
    adapter = CountingAdapter()
    gate = Gate(adapter)
    stays, leaves = add(start(adapter), "stays", "leaves", num_inference_steps=4)
    gate.wait_for_step()
    leaves.cancelled = True
    gate.let_one_step_pass()
    gate.wait_for_step()
    assert isinstance(leaves.wait(), RequestCancelledError)
    gate.remove()
    assert (stays.wait().output == 4).all()
    assert adapter.waves == [["stays", "leaves"], ["stays"], ["stays"], ["stays"]]


def test_a_request_that_is_cancelled_while_it_waits_never_runs(start: Start) -> None:
    adapter = CountingAdapter()
    gate = Gate(adapter)
    engine = start(adapter, max_num_seqs=1)
    add(engine, "first", num_inference_steps=1)
    gate.wait_for_step()
    (waiting,) = add(engine, "waiting")
    waiting.cancelled = True
    gate.remove()
    assert isinstance(waiting.wait(), RequestCancelledError)
    assert adapter.waves == [["first"]]


def test_a_request_ends_at_its_deadline(start: Start) -> None:
    adapter = CountingAdapter()
    adapter.before_step = lambda: time.sleep(0.02)
    engine = start(adapter)
    late, patient = RecordedReply(), RecordedReply()
    now = time.monotonic()
    engine.add_requests(
        [
            (fake_request("late", late, deadline=now + 0.05, num_inference_steps=1000), late),
            (fake_request("patient", patient, num_inference_steps=6), patient),
        ]
    )
    assert isinstance(late.wait(), DeadlineExceededError)
    assert isinstance(patient.wait(), DiffusionOutput)


def test_a_full_backlog_refuses_at_once(start: Start) -> None:
    adapter = CountingAdapter()
    gate = Gate(adapter)
    engine = start(adapter, max_num_seqs=1, max_queue_size=2)
    add(engine, "running")
    gate.wait_for_step()
    *accepted, refused = add(engine, "1", "2", "3")
    assert refused.is_answered
    gate.remove()
    assert isinstance(refused.wait(), QueueFullError)
    assert all(isinstance(reply.wait(), DiffusionOutput) for reply in accepted)


def test_clients_that_are_gone_do_not_keep_others_out(start: Start) -> None:
    adapter = CountingAdapter()
    gate = Gate(adapter)
    engine = start(adapter, max_num_seqs=1, max_queue_size=1)
    add(engine, "running")
    gate.wait_for_step()
    (gone,) = add(engine, "gone")
    gone.cancelled = True
    attempts: list[RecordedReply] = []

    def one_is_accepted() -> bool:
        attempts.extend(add(engine, "accepted"))
        return not attempts[-1].is_answered

    wait_until(one_is_accepted)  # the waiting ones are not asked at every attempt whether they are gone
    accepted = attempts[-1]
    gate.remove()
    assert isinstance(gone.wait(), RequestCancelledError)
    assert isinstance(accepted.wait(), DiffusionOutput)


def test_errors_are_answered_and_the_next_wave_runs(start: Start) -> None:
    engine = start(CountingAdapter())
    good, bad = add(engine, "good", "bad encode")
    assert isinstance(good.wait(), DiffusionOutput)
    assert isinstance(bad.wait(), ExecutionError)
    assert isinstance(add(engine, "again")[0].wait(), DiffusionOutput)


@pytest.mark.parametrize("place", ["execute", "schedule", "key", "receipt", "is_cancelled"])
def test_a_fault_of_our_own_answers_everyone_and_the_engine_lives_on(
    start: Start, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    adapter = CountingAdapter()
    engine = start(adapter)

    def fault(*_: object, **__: object) -> None:
        raise RuntimeError(f"a fault in {place}")

    with monkeypatch.context() as patch:
        targets = {
            "execute": (engine.runner, "execute"),
            "schedule": (engine.scheduler, "schedule"),
            "key": (adapter, "key"),
            "receipt": ("triton_diffusion.pending.PendingRequest.receipt",),
            "is_cancelled": ("triton_diffusion.request.OmniDiffusionRequest.raise_if_stopped",),
        }
        patch.setattr(*targets[place], fault)  # type: ignore[call-overload]
        replies = add(engine, "a", "b")
        for reply in replies:
            assert f"a fault in {place}" in str(reply.wait())
    assert isinstance(add(engine, "again")[0].wait(), DiffusionOutput)
    engine_is_idle(engine)
    assert engine.runner.num_live_states == 0


def test_an_answer_that_cannot_be_sent_becomes_an_error_answer(start: Start) -> None:
    class FullMemory(RecordedReply):
        def send_output(self, output: object, receipt: object) -> None:
            raise MemoryError("no shared memory left")

    reply = FullMemory()
    start(CountingAdapter()).add_requests([(fake_request(), reply)])
    assert "no shared memory left" in str(reply.wait())


def test_a_file_that_says_so_ends_the_wait_for_running_requests(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(STOP_FILE, str(tmp_path / "stop"))
    adapter = CountingAdapter()
    gate = Gate(adapter)
    engine = start(adapter)
    engine.must_stop = must_stop
    (running,) = add(engine, "running", num_inference_steps=1000)
    for _ in range(3):
        gate.wait_for_step()
        gate.let_one_step_pass()
    gate.wait_for_step()
    assert not running.is_answered
    (tmp_path / "stop").touch()
    gate.remove()
    assert isinstance(running.wait(), EngineStoppedError)


def test_each_request_is_answered_as_soon_as_it_is_decoded(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    adapter = CountingAdapter()
    decoded: list[str] = []
    decode = adapter.decode

    def slow_decode(state: Any) -> Any:
        if decoded:
            replies[0].wait()  # that of the first must not have to wait for this one
        decoded.append(state.request.prompt)
        return decode(state)

    monkeypatch.setattr(adapter, "decode", slow_decode)
    engine = start(adapter)
    replies = [RecordedReply() for _ in "abc"]
    engine.add_requests([(fake_request(prompt), reply) for prompt, reply in zip("abc", replies, strict=True)])
    for reply in replies:
        reply.wait()
    assert decoded == ["a", "b", "c"]


def test_pictures_do_not_pile_up_when_they_are_sent_slowly(start: Start) -> None:
    adapter = CountingAdapter()
    engine = start(adapter, max_num_seqs=1)
    sending = threading.Event()

    class SlowReply(RecordedReply):
        def send_output(self, output: DiffusionOutput, receipt: Receipt) -> None:
            sending.wait()
            super().send_output(output, receipt)

    replies = [SlowReply() for _ in range(6)]
    engine.add_requests([(fake_request("good", num_inference_steps=1), reply) for reply in replies])
    try:
        wait_until(lambda: len(adapter.waves) >= 3)
        time.sleep(0.3)  # in which a fourth could be made
        made = len(adapter.waves)
    finally:
        sending.set()
    assert made == 3, "two results wait to be sent, and one more is made"
    for reply in replies:
        reply.wait()


def test_shutdown_answers_what_is_left(start: Start) -> None:
    adapter = CountingAdapter()
    gate = Gate(adapter)
    engine = start(adapter, max_num_seqs=1)
    (running,) = add(engine, "running", num_inference_steps=1000)
    (waiting,) = add(engine, "waiting")
    gate.wait_for_step()
    stopping = threading.Thread(target=engine.shutdown)
    stopping.start()
    late: list[RecordedReply] = []

    def none_is_let_in_any_more() -> bool:
        late.extend(add(engine, "late"))
        return any(isinstance(answer, EngineStoppedError) for answer in late[-1].answers)

    wait_until(none_is_let_in_any_more)
    gate.remove()
    stopping.join(timeout=PATIENCE)
    for reply in (running, waiting, late[-1]):
        assert isinstance(reply.wait(), EngineStoppedError)


def test_many_threads_many_keys_one_answer_each(start: Start) -> None:
    adapter = CountingAdapter()
    gate = Gate(adapter)
    engine = start(adapter, max_num_seqs=4, max_queue_size=1000)
    replies: list[RecordedReply] = []
    prompts = ["good", "good", "bad encode", "good", "bad decode", "bad step"]

    def client(number: int) -> None:
        for request in range(20):
            replies.extend(add(engine, prompts[(number + request) % 6], height=8 * (1 + number % 3)))

    threads = [threading.Thread(target=client, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    gate.wait_for_step()
    wait_until(lambda: len(engine.progress()) >= 50)  # some wait together, others come while the waves run
    gate.remove()
    for thread in threads:
        thread.join()
    answers = [reply.wait() for reply in replies]
    assert len(answers) == 160
    assert sum(isinstance(answer, DiffusionOutput) for answer in answers) > 0
    assert max(map(len, adapter.waves)) > 1
    assert engine.runner.num_live_states == 0
