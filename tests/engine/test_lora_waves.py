"""What the rows of a wave may want together, what is left afterwards (nothing), and what cannot be served."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch._dynamo.testing import CompileCounter

from tests.engine.fakes import RecordedReply
from tests.engine.served_loras import LORAS, Served, with_lora
from tests.engine.staggered import TOGETHER, difference, run_staggered
from tests.families import BY_NAME
from tests.tiny_loras import load_into_stock, write_loras
from triton_diffusion.adapters import RequestState, StableDiffusion3Adapter
from triton_diffusion.adapters.loading import call_switches
from triton_diffusion.adapters.request_state import Evaluation
from triton_diffusion.config import EngineConfig
from triton_diffusion.errors import FieldValueError, RequestCancelledError
from triton_diffusion.lora.files import find_loras
from triton_diffusion.lora.loading import load_loras
from triton_diffusion.lora.wave_loras import WaveLoras
from triton_diffusion.request import OmniDiffusionRequest
from triton_diffusion.serving import build_engine

SD3 = BY_NAME["StableDiffusion3"]

MODES = pytest.mark.parametrize("mixed", [False, True], ids=["waves", "mixed"])


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Served:
    directory = tmp_path_factory.mktemp("loras")
    stock = SD3.build()
    load_into_stock(stock, directory, write_loras(SD3.build, directory, text_encoder=True))
    return Served(SD3, SD3.build, stock, directory)


def is_right(served: Served, adapter: Any, request: OmniDiffusionRequest) -> bool:
    return difference(adapter.latents[request.request_id], served.stock_call(request)) <= 1e-5


@pytest.mark.parametrize("step_execution", [False, True], ids=["request", "staggered"])
def test_by_default_a_wave_has_one_selection_of_adapters(served: Served, step_execution: bool) -> None:
    adapter = served.adapter(served.build(), step_execution=step_execution)
    assert isinstance(adapter.loras, WaveLoras)
    loras = ("ink", "ink:1", "night", None, "ink:0.5", "", "night", "ink:0")
    requests = served.requests(adapter, loras)
    replies = run_staggered(adapter, requests, TOGETHER)
    keys = [dict(adapter.key(request).items).get("lora") for request in requests]
    assert keys == ["ink:1", "ink:1", "night:1", None, "ink:0.5", None, "night:1", None]
    for request, key in zip(requests, keys, strict=True):
        assert is_right(served, adapter, request)
        receipt = replies[request.request_id].receipt
        assert receipt is not None
        assert receipt.wave_size <= keys.count(key)


def test_vllm_omnis_rule_keeps_different_adapters_apart_even_where_they_could_be_mixed(served: Served) -> None:
    adapter = served.adapter(served.build(), lora_mixed=True, strict_batch_key=True)
    ink, night = (with_lora(SD3.requests(adapter, 1)[0], lora) for lora in ("ink", "night"))
    assert adapter.key(ink) != adapter.key(night)


@MODES
def test_nothing_is_left_of_a_wave_that_failed_or_was_cancelled(served: Served, mixed: bool) -> None:
    pipeline = served.build()
    adapter = served.adapter(pipeline, lora_mixed=mixed)
    base, stays, leaves, fails = SD3.requests(adapter, 4, num_images_per_prompt=1)
    engine = build_engine(adapter, adapter.config)

    def run(*requests: OmniDiffusionRequest) -> list[Any]:
        replies = [RecordedReply() for _ in requests]
        engine.add_requests(list(zip(requests, replies, strict=True)))
        while engine.progress():
            engine.step()
        return [reply.wait() for reply in replies]

    # 1. A wave of which one request is cancelled
    stays, leaves = with_lora(stays, "wide"), with_lora(leaves, "wide")
    leaves.is_cancelled = lambda: engine.progress()[leaves.request_id].step >= 2
    _, cancelled = run(stays, leaves)
    assert isinstance(cancelled, RequestCancelledError)
    assert is_right(served, adapter, stays)

    # 2. A wave that fails in the middle of the model
    with failing(pipeline.transformer.transformer_blocks[1]):
        (error,) = run(with_lora(fails, "wide:2"))
    assert "the device broke" in str(error)

    # 3. A wave without adapters, and one that never knew of any
    run(base)
    untouched = served.family.adapter(served.build())
    run_staggered(untouched, [base], TOGETHER)
    assert torch.equal(adapter.latents[base.request_id], untouched.latents[base.request_id]), "not one bit"
    engine.shutdown()


@contextmanager
def failing(module: torch.nn.Module) -> Iterator[None]:
    def fail(*_: Any) -> None:
        raise RuntimeError("the device broke")

    hook = module.register_forward_pre_hook(fail)
    yield
    hook.remove()


def test_batch_invariant_holds_whoever_has_which_adapter(served: Served) -> None:
    few = {"num_images_per_prompt": 1, "num_inference_steps": 3}

    def bits(place: int | None) -> torch.Tensor:
        adapter = served.adapter(served.build(), lora_mixed=True, batch_invariant=True)
        mine, *others = SD3.requests(adapter, 8, **few)
        mine = with_lora(mine, "ink:0.7,night")
        others = [with_lora(other, lora) for other, lora in zip(others, LORAS, strict=False)]
        requests = [mine] if place is None else [*others[:place], mine, *others[place:]]
        run_staggered(adapter, requests, TOGETHER)
        latents: torch.Tensor = adapter.latents[mine.request_id]
        return latents

    alone = bits(None)
    for place in (0, 3, 7):
        assert torch.equal(bits(place), alone)


def test_a_compiled_model_is_compiled_once_whoever_wants_which_adapters(
    compile_counter: CompileCounter, tmp_path: Path
) -> None:
    family = BY_NAME["Flux"]
    write_loras(family.build, tmp_path, text_encoder=False)
    pipeline = family.build()
    call_switches(pipeline, {"transformer.compile_repeated_blocks": {"backend": compile_counter}})
    adapter = Served(family, family.build, None, tmp_path).adapter(pipeline, lora_mixed=True, batch_invariant=True)
    graphs = []
    for loras in (["ink", None, "night"], [None], ["wide", "ink:0.3,night", "ink", "ink"]):
        requests = family.requests(adapter, len(loras), num_images_per_prompt=1, num_inference_steps=2)
        run_staggered(adapter, [with_lora(*each) for each in zip(requests, loras, strict=True)], TOGETHER)
        graphs.append(compile_counter.frame_count)
    assert graphs[0] == graphs[1] == graphs[2] > 0


@MODES
def test_a_class_with_steps_of_its_own_gets_the_adapters_of_each_step(served: Served, mixed: bool) -> None:
    class OwnSteps(StableDiffusion3Adapter):
        def denoise_step(self, states: Sequence[RequestState]) -> list[torch.Tensor]:
            return self._parts([Evaluation(state, state.conditioning) for state in states])

    def latents(loras: tuple[str | None, ...], **config: Any) -> list[torch.Tensor]:
        adapter = OwnSteps(served.build(), EngineConfig(model="tiny", max_num_seqs=8, **config))
        files = find_loras(str(served.directory), {}, Path())
        adapter.loras = load_loras(adapter.pipeline, files, adapter.config)
        found: dict[str, Any] = {}
        adapter.decode = lambda state: found.setdefault(  # type: ignore[method-assign]
            state.request.request_id, (state.latents, np.zeros((1, 8, 8, 3), np.uint8))
        )[1]
        requests = SD3.requests(adapter, len(loras), num_images_per_prompt=1, num_inference_steps=4)
        requests = [with_lora(*each) for each in zip(requests, loras, strict=True)]
        run_staggered(adapter, requests, (0, 1, 2, 2))
        return [found[request.request_id][0] for request in requests]

    together = latents(("ink", "night", None, "ink:0.5"), step_execution=True, lora_mixed=mixed)
    for number, lora in enumerate(("ink", "night", None, "ink:0.5")):
        alone = latents((None,) * number + (lora,), lora_mixed=True)[number]
        assert difference(together[number], alone) <= 1e-5


def test_the_factors_of_a_step_are_not_kept_for_other_requests(served: Served) -> None:
    adapter = served.adapter(served.build(), lora_mixed=True)
    for loras in (("ink", "night"), ("wide", "ink", None), ("night", "night")):
        run_staggered(adapter, served.requests(adapter, loras), TOGETHER)
        assert {selection.names[0] for rows in adapter.loras._compositions for selection in rows if selection} <= {
            lora for lora in loras if lora
        }


@MODES
def test_adapters_beyond_the_budget_take_turns_on_the_device(served: Served, mixed: bool) -> None:
    adapter = served.adapter(served.build(), lora_mixed=mixed)
    adapter.loras.cache._budget = 80_000  # bytes, of which ink has 16 k, night 61 k and wide about 50 k
    seen = []
    for lora in ("ink", "night", "ink", "wide"):
        request = with_lora(SD3.requests(adapter, 1)[0], lora)
        run_staggered(adapter, [request], TOGETHER)
        assert is_right(served, adapter, request)
        seen.append(adapter.loras.cache.present)
    assert seen[1] == ["ink", "night"]
    assert seen[2] == ["night", "ink"]
    assert seen[3] == ["ink", "wide"], "night was the least recently used"


def test_a_prompt_is_encoded_anew_for_another_adapter_of_the_text_encoder_only(served: Served) -> None:
    pipeline = served.build()
    adapter = served.adapter(pipeline, lora_mixed=True)
    encode_prompt = pipeline.encode_prompt.encode_prompt = Mock(wraps=pipeline.encode_prompt.encode_prompt)
    request = SD3.requests(adapter, 1)[0]
    for lora in (None, "ink", "night:2", "wide", "wide", "wide:0.5", "ink,wide"):
        adapter.encode_request(with_lora(request, lora))
    assert encode_prompt.call_count == 3, "none (or one that does not change the text encoder), wide, wide at half"


def test_an_unknown_adapter_is_refused_before_the_request_is_queued(served: Served) -> None:
    adapter = served.adapter(served.build())
    request = with_lora(SD3.requests(adapter, 1)[0], "inc")
    with pytest.raises(FieldValueError, match="no adapter 'inc', did you mean 'ink'.*Known are: ink, night, wide"):
        adapter.check_request(request)
