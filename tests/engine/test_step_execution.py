"""Step-wise continuous batching: requests that join and leave at any step get what the stock call gives alone."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from tests.engine.fakes import CountingAdapter, RecordedReply, fake_request
from tests.engine.staggered import run_staggered
from tests.engine.test_engine import Gate, add
from tests.example_requests import mixed_requests
from tests.tiny_pipelines import pixart_alpha, stable_diffusion_3
from triton_diffusion.adapters import StableDiffusion3Adapter, StockAdapter
from triton_diffusion.batch import DiffusionRequestBatch
from triton_diffusion.config import EngineConfig
from triton_diffusion.engine import DiffusionEngine
from triton_diffusion.errors import ConfigurationError, DeadlineExceededError, ExecutionError, RequestCancelledError
from triton_diffusion.model_runner import ModelRunner, StepProgress
from triton_diffusion.output import DiffusionOutput
from triton_diffusion.request import OmniDiffusionRequest
from triton_diffusion.scheduling import StepScheduler
from triton_diffusion.serving import build_engine

STEPWISE = EngineConfig(model="tiny", max_num_seqs=8, step_execution=True)


def test_a_receipt_says_when_a_request_joined_and_who_shared_its_steps() -> None:
    adapter = StableDiffusion3Adapter(stable_diffusion_3(), STEPWISE)
    requests = mixed_requests(8)
    replies = run_staggered(adapter, requests)
    receipts = [replies[request.request_id].receipt for request in requests]
    for request, receipt in zip(requests, receipts, strict=True):
        assert receipt is not None
        assert receipt.steps == len(receipt.rows_per_step) == request.sampling_params.num_inference_steps
    joined = [receipt.joined_at_wave for receipt in receipts if receipt]
    assert joined == sorted(joined)
    assert len(set(joined)) >= 5, "they joined at different steps"
    assert max(receipt.rows for receipt in receipts if receipt) > 3, "and ran fused"


def test_the_pictures_are_those_of_request_mode() -> None:
    pipeline = stable_diffusion_3()
    requests = mixed_requests(4)
    replies = run_staggered(StableDiffusion3Adapter(pipeline, STEPWISE), requests)
    waves = StableDiffusion3Adapter(pipeline, STEPWISE).forward(DiffusionRequestBatch(requests))
    for request, output in zip(requests, waves, strict=True):
        answer = replies[request.request_id].wait()
        assert output.output is not None
        assert np.abs(answer.output.astype(int) - output.output.astype(int)).max() <= 1


def test_a_class_without_the_step_methods_is_refused_by_name() -> None:
    adapter = StockAdapter(pixart_alpha(), STEPWISE)
    message = (
        "step_execution: StockAdapter, which drives PixArtAlphaPipeline, has no prepare_encode, denoise_step, "
        "step_scheduler, post_decode"
    )
    with pytest.raises(ConfigurationError, match=message):
        build_engine(adapter, STEPWISE)


def test_a_wait_for_company_is_warned_about_once(caplog: pytest.LogCaptureFixture) -> None:
    config = EngineConfig(model="tiny", max_num_seqs=8, step_execution=True, request_batch_max_wait_ms=20)
    build_engine(StableDiffusion3Adapter(stable_diffusion_3(), config), config).shutdown()
    warnings = [record.message for record in caplog.records if "waits for no company" in record.message]
    assert len(warnings) == 1
    assert "holds requests back for 20 ms: remove max_queue_delay_microseconds" in warnings[0]


def stepwise_engine(adapter: CountingAdapter, max_num_seqs: int = 8) -> DiffusionEngine:
    return DiffusionEngine(ModelRunner(adapter), StepScheduler(max_num_seqs, 1000))


def test_a_newcomer_joins_and_a_short_one_leaves_while_a_long_one_runs() -> None:
    adapter = CountingAdapter()
    gate = Gate(adapter)
    engine = stepwise_engine(adapter)
    engine.start()
    (long,) = add(engine, "long", num_inference_steps=5)
    gate.wait_for_step()
    (short,) = add(engine, "short", num_inference_steps=2)
    for _ in range(2):
        gate.let_one_step_pass()
        gate.wait_for_step()
    gate.let_one_step_pass()
    short.wait()
    assert not long.is_answered
    gate.remove()
    long.wait()
    engine.shutdown()
    assert adapter.waves == [["long"], ["long", "short"], ["long", "short"], ["long"], ["long"]]


def test_progress_is_known_at_every_moment() -> None:
    adapter = CountingAdapter(max_num_seqs=1)
    engine = stepwise_engine(adapter, max_num_seqs=1)
    running, waiting = add(engine, "running", "waiting", num_inference_steps=3)
    seen = []
    while engine.progress():
        seen.append(sorted(engine.progress().values()))
        engine.step()
    assert seen[0] == [StepProgress(0, 3)] * 2
    assert seen[2] == [StepProgress(0, 3), StepProgress(2, 3)]
    engine.shutdown()
    assert isinstance(running.wait(), DiffusionOutput)
    assert isinstance(waiting.wait(), DiffusionOutput)


def test_newcomers_and_leavers_hold_the_others_up_one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    adapter = CountingAdapter()
    engine = stepwise_engine(adapter)
    work: list[str] = []
    for name in ("prepare_encode", "denoise_step", "decode"):
        stock = getattr(adapter, name)

        def counted(argument: Any, name: str = name, stock: Any = stock) -> Any:
            work.append(name)
            return stock(argument)

        monkeypatch.setattr(adapter, name, counted)
    add(engine, "long", num_inference_steps=20)
    engine.step()
    add(engine, "a", "b", "c", num_inference_steps=1)
    while engine.progress():
        engine.step()
    engine.shutdown()
    between_steps = " ".join(work).split("denoise_step")
    assert all(part.split().count("prepare_encode") <= 1 for part in between_steps)
    assert all(part.split().count("decode") <= 1 for part in between_steps)


def test_a_request_of_many_images_is_decoded_between_steps_part_by_part(monkeypatch: pytest.MonkeyPatch) -> None:
    adapter = CountingAdapter()
    engine = stepwise_engine(adapter)
    work: list[str] = []
    prepare, decode = adapter.prepare_encode, adapter.decode

    def prepare_rows(request: OmniDiffusionRequest) -> Any:
        state = prepare(request)
        state.latents = state.latents.repeat(request.sampling_params.num_images_per_prompt or 1, 1)
        return state

    def decode_part(state: Any) -> Any:
        work.append(f"decode {state.num_rows}")
        return decode(state)

    monkeypatch.setattr(adapter, "prepare_encode", prepare_rows)
    monkeypatch.setattr(adapter, "decode", decode_part)
    adapter.before_step = lambda: work.append("step")
    add(engine, "long", num_inference_steps=20)
    engine.step()
    (many,) = add(engine, "many", num_inference_steps=1, num_images_per_prompt=5)
    while engine.progress():
        engine.step()
    engine.shutdown()
    assert many.wait().output.shape[0] == 5
    assert " ".join(work).count("decode 1 step decode 1 step decode 1 step decode 1 step decode 1") == 1


@pytest.mark.parametrize("returned", [None, "a picture", DiffusionOutput(output=np.zeros([1, 2, 2, 3], np.float32))])
def test_a_wrong_post_decode_is_its_own_requests_error(returned: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    adapter = CountingAdapter()
    engine = stepwise_engine(adapter)
    (neighbour,) = add(engine, "neighbour", num_inference_steps=9)
    (wrong,) = add(engine, "wrong", num_inference_steps=2)
    post_decode = adapter.post_decode
    monkeypatch.setattr(
        adapter, "post_decode", lambda state: returned if state.request.prompt == "wrong" else post_decode(state)
    )
    while engine.progress():
        engine.step()
    engine.shutdown()
    assert str(wrong.wait()).startswith("CountingAdapter.post_decode must return a DiffusionOutput")
    assert isinstance(neighbour.wait(), DiffusionOutput)


def test_a_dtype_of_its_own_cannot_join(monkeypatch: pytest.MonkeyPatch) -> None:
    adapter = CountingAdapter()
    engine = stepwise_engine(adapter)
    (first,) = add(engine, "first", num_inference_steps=3)
    engine.step()
    stock = adapter.prepare_encode

    def half(request: OmniDiffusionRequest) -> Any:
        state = stock(request)
        state.latents = state.latents.half()
        return state

    monkeypatch.setattr(adapter, "prepare_encode", half)
    (other,) = add(engine, "other")
    while engine.progress():
        engine.step()
    engine.shutdown()
    assert isinstance(first.wait(), DiffusionOutput)
    assert isinstance(other.wait(), ExecutionError)
    assert "latents of torch.float16 cannot join those of torch.float32" in str(other.wait())


def test_a_smaller_priority_goes_first() -> None:
    adapter = CountingAdapter(max_num_seqs=1)
    engine = stepwise_engine(adapter, max_num_seqs=1)
    add(engine, "later", num_inference_steps=1)
    urgent = fake_request("urgent", num_inference_steps=1)
    urgent.priority = -5
    engine.add_requests([(urgent, RecordedReply())])
    while engine.progress():
        engine.step()
    engine.shutdown()
    assert adapter.waves == [["urgent"], ["later"]]


def test_four_hundred_requests_half_of_them_stopped_at_random() -> None:
    adapter = CountingAdapter()
    engine = stepwise_engine(adapter)
    chance = random.Random(0)
    stay: list[RecordedReply] = []
    leave: list[RecordedReply] = []
    while len(leave) < 200 or engine.progress():
        if len(leave) < 200:
            height = 8 * chance.randint(1, 3)
            stay += add(engine, "stays", height=height, num_inference_steps=chance.randint(1, 12))
            if chance.random() < 0.3:
                leave += add(engine, "late", height=height, num_inference_steps=12, deadline=0.0)
            else:
                leave += add(engine, "leaves", height=height, num_inference_steps=12)
        chance.choice(leave).cancelled = True
        for _ in range(chance.randint(0, 3)):
            engine.step()
        if len(leave) == 200:
            for reply in leave:
                reply.cancelled = True
    engine.shutdown()
    assert all(isinstance(reply.wait(), DiffusionOutput) for reply in stay)
    answers = [reply.wait() for reply in leave]
    assert all(
        isinstance(answer, (RequestCancelledError, DeadlineExceededError, DiffusionOutput)) for answer in answers
    )
    assert sum(isinstance(answer, DiffusionOutput) for answer in answers) < 100
    assert engine.runner.num_live_states == 0
    assert engine.scheduler.num_running == engine.scheduler.num_waiting == 0
