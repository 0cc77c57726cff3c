"""Each request's error is its own, whatever stage it comes from."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.engine.fakes import CountingAdapter, CountingPipeline, fake_request
from tests.families import BY_NAME
from triton_diffusion.adapters import PipelineAdapter
from triton_diffusion.batch import DiffusionRequestBatch
from triton_diffusion.config import EngineConfig
from triton_diffusion.errors import ExecutionError, NonFiniteError, PipelineOutputError
from triton_diffusion.model_runner import ModelRunner
from triton_diffusion.output import DiffusionOutput


def run_to_the_end(runner: ModelRunner, *prompts: str, **params: int) -> dict[str, DiffusionOutput]:
    """The outputs by prompt, of a wave run as the engine runs it."""
    made = [fake_request(prompt, None, None, **params) for prompt in prompts]
    left = {request.request_id: request for request in made}
    outputs: dict[str, DiffusionOutput] = {}
    denoised: set[str] = set()
    while left:
        running = [request for request in left.values() if request.request_id not in denoised]
        ended = runner.execute(DiffusionRequestBatch(running))
        denoised.update(ended.denoised)
        for request_id, output in [*ended.items(), *runner.decode()]:
            outputs[left.pop(request_id).prompt] = output
    return outputs


@pytest.mark.parametrize(
    ("prompt", "error", "message"),
    [
        ("bad encode", ExecutionError, "RuntimeError: the tokenizer broke"),
        ("bad step", ExecutionError, "can't allocate memory"),
        ("bad decode", ExecutionError, "ValueError: the decoder broke"),
        ("nan", NonFiniteError, "not finite"),
    ],
)
def test_one_bad_request_does_not_harm_its_neighbours(prompt: str, error: type[Exception], message: str) -> None:
    runner = ModelRunner(CountingAdapter())
    outputs = run_to_the_end(runner, "a", "b", prompt, "c", "d")
    assert isinstance(outputs[prompt].error, error)
    assert message in str(outputs[prompt].error)
    for neighbour in "abcd":
        pixels = outputs[neighbour].output
        assert pixels is not None
        assert (pixels == 3).all(), "every neighbour took its three steps, no more and no less"
    assert runner.num_live_states == 0


def test_a_failing_pass_is_tried_again_with_each_half() -> None:
    adapter = CountingAdapter()
    run_to_the_end(ModelRunner(adapter), "a", "b", "bad step", "c", num_inference_steps=1)
    assert adapter.waves == [["a", "b", "bad step", "c"], ["a", "b"], ["bad step", "c"], ["bad step"], ["c"]]


def test_a_request_with_fewer_steps_ends_early() -> None:
    runner = ModelRunner(CountingAdapter())
    short, long = fake_request("short", num_inference_steps=1), fake_request("long", num_inference_steps=2)
    assert runner.execute(DiffusionRequestBatch([short, long])).denoised == [short.request_id]
    assert [request_id for request_id, _ in runner.decode()] == [short.request_id]
    assert runner.num_live_states == 1


def test_a_released_request_leaves_nothing() -> None:
    runner = ModelRunner(CountingAdapter())
    request = fake_request()
    runner.execute(DiffusionRequestBatch([request]))
    runner.release([request.request_id, "never seen"])
    assert runner.num_live_states == 0


class ForwardOnly(PipelineAdapter):
    """A class that has only `forward`, which returns, or raises, what it is told."""

    supports_request_batch = True

    def __init__(self, returned: Any) -> None:
        super().__init__(CountingPipeline(), EngineConfig(max_num_seqs=8, model="fake"))
        self.returned = returned

    def forward(self, batch: DiffusionRequestBatch) -> list[DiffusionOutput]:
        if isinstance(self.returned, Exception):
            raise self.returned
        result: list[DiffusionOutput] = self.returned
        return result


def test_a_forward_answers_all_its_requests_at_once() -> None:
    outputs = [DiffusionOutput(output=np.full([1, 2, 2, 3], value, np.uint8)) for value in (1, 2)]
    results = run_to_the_end(ModelRunner(ForwardOnly(outputs)), "a", "b")
    assert [results[name].output.max() for name in "ab"] == [1, 2]  # type: ignore[union-attr]


@pytest.mark.parametrize("returned", [None, [], [DiffusionOutput()] * 2, ["a", "b"]])
def test_a_wrong_return_is_every_requests_error_and_names_the_class(returned: Any) -> None:
    results = run_to_the_end(ModelRunner(ForwardOnly(returned)), "a", "b")
    for output in results.values():
        assert isinstance(output.error, PipelineOutputError)
        assert "ForwardOnly.forward must return a list of 2 DiffusionOutput" in str(output.error)


def test_a_raising_forward_is_every_requests_error() -> None:
    results = run_to_the_end(ModelRunner(ForwardOnly(ZeroDivisionError("steps"))), "a", "b")
    assert {str(output.error) for output in results.values()} == {"ZeroDivisionError: steps"}


@pytest.mark.parametrize(
    ("family", "passes"),
    [
        ("StableDiffusion3", [4, 4, 2]),  # the five images with the negative prompt, then with their own
        ("QwenImage", [2, 2, 1, 2, 2, 1]),  # a pass has the rows of one prompt or of the other
    ],
)
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_a_step_says_how_many_rows_each_of_its_forward_passes_had(
    family: str, passes: list[int], batch_invariant: bool
) -> None:
    pipeline = BY_NAME[family].build()
    adapter = BY_NAME[family].adapter(pipeline, max_num_seqs=2, batch_invariant=batch_invariant)
    given: list[int] = []  # counted where the rows arrive
    pipeline.transformer.register_forward_pre_hook(
        lambda _, __, arguments: given.append(len(arguments["hidden_states"])), with_kwargs=True
    )
    (request,) = BY_NAME[family].requests(adapter, 1, num_images_per_prompt=5, num_inference_steps=2)
    runner = ModelRunner(adapter)
    for _ in range(2):
        given.clear()
        step = runner.execute(DiffusionRequestBatch([request]))
        assert step.rows == 5
        assert list(step.forward_rows) == passes
        assert given == ([max(passes)] * len(passes) if batch_invariant else passes), "padding is not counted"


def test_a_step_of_a_class_without_fused_passes_counts_as_one() -> None:
    step = ModelRunner(CountingAdapter()).execute(
        DiffusionRequestBatch([fake_request("a", None, None), fake_request("b", None, None)])
    )
    assert list(step.forward_rows) == [2]
