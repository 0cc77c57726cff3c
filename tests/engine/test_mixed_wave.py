"""One wave with a broken image, a prompt that cannot be encoded and latents of NaN: each gets its own error."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from tests.engine.fakes import RecordedReply
from tests.families import BY_NAME
from triton_diffusion.errors import ExecutionError, NonFiniteError
from triton_diffusion.output import DiffusionOutput
from triton_diffusion.serving import build_engine


@pytest.mark.parametrize("step_execution", [False, True], ids=["request-level", "step-wise"])
def test_the_others_get_their_pictures(step_execution: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    family = BY_NAME["StableDiffusion3Img2Img"]
    pipeline = family.build()
    adapter = family.adapter(pipeline, step_execution=step_execution)
    requests = family.requests(adapter, 5, num_images_per_prompt=1)
    broken_image, no_tokens, not_finite, good, other = requests
    object.__setattr__(broken_image, "image", np.zeros([4, 4], np.uint8)[:0])
    no_tokens.prompt = "no tokens"
    tokenize, step = type(pipeline.tokenizer).__call__, adapter.step_scheduler

    def failing_tokenizer(self: Any, text: Any, *arguments: Any, **named: Any) -> Any:
        if "no tokens" in text:
            raise RuntimeError("the tokenizer knows no such tokens")
        return tokenize(self, text, *arguments, **named)

    def step_to_nan(state: Any, prediction: Any) -> None:
        step(state, prediction * float("nan") if state.request is not_finite else prediction)

    monkeypatch.setattr(type(pipeline.tokenizer), "__call__", failing_tokenizer)
    adapter.step_scheduler = step_to_nan

    replies = [RecordedReply() for _ in requests]
    engine = build_engine(adapter, adapter.config)
    engine.add_requests(list(zip(requests, replies, strict=True)))
    while engine.progress():
        engine.step()
    engine.shutdown()
    answers = [reply.wait() for reply in replies]
    assert isinstance(answers[0], ExecutionError)
    assert "the tokenizer knows no such tokens" in str(answers[1])
    assert isinstance(answers[2], NonFiniteError)
    monkeypatch.undo()
    for request, answer in ((good, answers[3]), (other, answers[4])):
        assert isinstance(answer, DiffusionOutput)
        assert answer.output is not None
        alone = np.stack(family.stock_call(pipeline, dataclasses.replace(request), "np"))
        assert np.abs(answer.output - (alone * 255).round()).max() <= 1
    assert engine.runner.num_live_states == 0
