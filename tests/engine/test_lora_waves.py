"""What the rows of a wave may want together, what is left afterwards (nothing), and what cannot be served."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch._dynamo.testing import CompileCounter

from tests.engine.fakes import RecordedReply
from tests.engine.staggered import TOGETHER, difference, run_staggered
from tests.engine.test_lora import LORAS, Served, with_lora
from tests.families import BY_NAME
from tests.tiny_loras import FEED_FORWARD, load_into_stock, write_lora, write_loras
from tests.tiny_other_pipelines import aura_flow
from tests.tiny_pipelines import flux, pixart_alpha, stable_diffusion, stable_diffusion_3
from triton_diffusion.adapters.loading import call_switches, load_adapter
from triton_diffusion.config import EngineConfig
from triton_diffusion.errors import ConfigurationError, FieldValueError, RequestCancelledError
from triton_diffusion.lora.files import TWO_TRANSFORMERS, find_loras
from triton_diffusion.lora.loading import load_loras
from triton_diffusion.lora.row_loras import RowLoras
from triton_diffusion.lora.wave_loras import WaveLoras
from triton_diffusion.request import OmniDiffusionRequest
from triton_diffusion.sampling_params import SamplingParams
from triton_diffusion.serving import build_engine

SD3 = BY_NAME["StableDiffusion3"]


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


@pytest.mark.parametrize("mixed", [False, True], ids=["waves", "mixed"])
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


@pytest.mark.parametrize("mixed", [False, True], ids=["waves", "mixed"])
def test_adapters_beyond_the_budget_take_turns_on_the_device(served: Served, mixed: bool) -> None:
    adapter = served.adapter(served.build(), lora_mixed=mixed)
    adapter.loras.cache._budget = 80_000  # bytes, of which ink has 16 k, night 61 k and wide 56 k
    seen = []
    for lora in ("ink", "night", "wide", "ink"):
        request = with_lora(SD3.requests(adapter, 1)[0], lora)
        run_staggered(adapter, [request], TOGETHER)
        assert is_right(served, adapter, request)
        seen.append(adapter.loras.cache.present)
    assert seen[1] == ["ink", "night"]
    assert seen[2] == ["wide"], "there was no room beside night, which was used later than ink"


def test_a_prompt_is_encoded_anew_for_another_adapter_of_the_text_encoder_only(served: Served) -> None:
    pipeline = served.build()
    adapter = served.adapter(pipeline, lora_mixed=True)
    encode_prompt = pipeline.encode_prompt.encode_prompt = Mock(wraps=pipeline.encode_prompt.encode_prompt)
    request = SD3.requests(adapter, 1)[0]
    for lora in (None, "ink", "night:2", "wide", "wide", "wide:0.5", "ink,wide"):
        adapter.encode_request(with_lora(request, lora))
    assert encode_prompt.call_count == 3, "none (or one that does not change the text encoder), wide, wide at half"


class TestLoading:
    """Every adapter is read and checked before the model is ready."""

    def load(self, directory: Path, pipeline: Any = None, **config: Any) -> Any:
        pipeline = pipeline or stable_diffusion_3()
        engine_config = EngineConfig(model="tiny", lora_directory=str(directory), **config)
        return load_loras(pipeline, find_loras(str(directory), {}, Path()), engine_config)

    def test_an_adapter_of_another_pipeline_is_named(self, tmp_path: Path) -> None:
        write_lora(flux(), tmp_path / "ink", rank=2, seed=0, targets=("single_transformer_blocks.0.attn.to_q",))
        with pytest.raises(ConfigurationError, match=r"lora 'ink' \(.*ink/pytorch_lora.*StableDiffusion3Pipeline"):
            self.load(tmp_path)

    def test_an_adapter_for_a_larger_model_is_named(self, tmp_path: Path) -> None:
        folder = write_lora(stable_diffusion_3(), tmp_path / "ink", rank=2, seed=0)
        self.rewrite(
            folder, lambda name, tensor: torch.zeros(2, 96) if name.endswith("to_q.lora_A.weight") else tensor
        )
        with pytest.raises(ConfigurationError, match=r"lora 'ink' .*does not fit.*"):
            self.load(tmp_path)

    def test_an_adapter_that_binds_no_layer_is_named(self, tmp_path: Path) -> None:
        (tmp_path / "ink").mkdir()
        save_file({"lora_te9.x.lora_A.weight": torch.zeros(2, 2)}, tmp_path / "ink" / "a.safetensors")
        with pytest.raises(ConfigurationError, match=r"lora 'ink'"):
            self.load(tmp_path)

    def test_an_adapter_that_is_not_finite_is_named(self, tmp_path: Path) -> None:
        folder = write_lora(stable_diffusion_3(), tmp_path / "ink", rank=2, seed=0)
        self.rewrite(folder, lambda _, tensor: torch.full_like(tensor, float("nan")))
        with pytest.raises(ConfigurationError, match=r"lora 'ink' .*holds NaN or infinity"):
            self.load(tmp_path)

    def test_a_file_that_is_cut_off_is_named(self, tmp_path: Path) -> None:
        folder = write_lora(stable_diffusion_3(), tmp_path / "ink", rank=2, seed=0)
        file = folder / "pytorch_lora_weights.safetensors"
        file.write_bytes(file.read_bytes()[:-100])
        with pytest.raises(ConfigurationError, match=r"lora 'ink'"):
            self.load(tmp_path)

    def test_dora_is_served_in_waves_of_one_adapter_and_not_in_mixed_ones(self, tmp_path: Path) -> None:
        write_lora(stable_diffusion_3(), tmp_path / "dora", rank=2, seed=0, use_dora=True)
        assert isinstance(self.load(tmp_path), WaveLoras)
        with pytest.raises(ConfigurationError, match=r"lora 'dora' is more than a product.*set lora_mixed to false"):
            self.load(tmp_path, lora_mixed=True)

    def test_dots_in_names_and_any_ranks_beside_each_other(self, tmp_path: Path) -> None:
        for rank, name in ((1, "v1.0"), (16, "v1.1"), (5, "v1-2")):
            write_lora(stable_diffusion_3(), tmp_path / name, rank=rank, seed=rank, targets=FEED_FORWARD)
        loras = self.load(tmp_path, lora_mixed=True)
        assert isinstance(loras, RowLoras)
        assert loras.names == ("v1-2", "v1.0", "v1.1")

    @pytest.mark.parametrize("mixed", [False, True], ids=["waves", "mixed"])
    def test_an_adapter_for_both_of_wan_2_2s_transformers(self, tmp_path: Path, mixed: bool) -> None:
        family = BY_NAME["Wan2.2"]
        stock = family.build()
        for second, file in enumerate(TWO_TRANSFORMERS):
            write_lora(
                family.build(), tmp_path / "ink", rank=2 + second, seed=second, transformer_2=bool(second), file=file
            )
            stock.load_lora_weights(
                tmp_path / "ink", weight_name=file, adapter_name="ink", load_into_transformer_2=bool(second)
            )
        served = Served(family, family.build, stock, tmp_path)
        adapter = served.adapter(family.build(), lora_mixed=mixed)
        requests = served.requests(adapter, ("ink", "ink:0.5"))
        run_staggered(adapter, requests, TOGETHER)
        assert all(is_right(served, adapter, request) for request in requests)

    @pytest.mark.parametrize("mixed", [False, True])
    def test_a_pipeline_that_takes_no_adapters(self, tmp_path: Path, mixed: bool) -> None:
        (tmp_path / "ink.safetensors").touch()
        with pytest.raises(ConfigurationError, match="PixArtAlphaPipeline takes no LoRA adapters"):
            self.load(tmp_path, pixart_alpha())

    def rewrite(self, folder: Path, change: Any) -> None:
        file = folder / "pytorch_lora_weights.safetensors"
        save_file({name: change(name, tensor) for name, tensor in load_file(file).items()}, file)


def test_a_pipeline_that_runs_by_its_stock_call_has_adapters_too(tmp_path: Path) -> None:
    write_lora(aura_flow(), tmp_path / "loras" / "ink", rank=3, seed=0, targets="all")
    aura_flow().save_pretrained(tmp_path / "checkpoint")
    config = {"model": str(tmp_path / "checkpoint"), "lora_directory": str(tmp_path / "loras")}
    adapter: Any = load_adapter(EngineConfig(**config))  # type: ignore[arg-type]
    stock = aura_flow()
    load_into_stock(stock, tmp_path / "loras", ["ink"])
    request = OmniDiffusionRequest(
        prompt="a cat",
        request_id="one",
        sampling_params=dataclasses.replace(adapter.defaults, seed=3, num_inference_steps=2, height=32, width=32),
    )
    for lora in ("ink:0.5", None, "ink:0.5"):
        wanted = with_lora(request, lora)
        output = run_staggered(adapter, [wanted], TOGETHER)["one"].wait()
        stock.enable_lora() if lora else stock.disable_lora()
        if lora:
            stock.set_adapters(["ink"], [0.5])
        pixels = stock(
            "a cat",
            generator=torch.Generator().manual_seed(3),
            num_inference_steps=2,
            height=32,
            width=32,
            output_type="np",
        )[0]
        assert abs(output.output.astype(float) - (pixels * 255).round()).max() <= 1
    with pytest.raises(ConfigurationError, match="lora_mixed: StockAdapter runs the model by itself"):
        load_adapter(EngineConfig(**config, lora_mixed=True))  # type: ignore[arg-type]


def test_a_default_adapter_may_be_given_and_must_exist(tmp_path: Path) -> None:
    write_lora(stable_diffusion(), tmp_path / "loras" / "ink", rank=3, seed=0)
    stable_diffusion().save_pretrained(tmp_path / "checkpoint")
    config: dict[str, Any] = {"model": str(tmp_path / "checkpoint"), "lora_directory": str(tmp_path / "loras")}
    adapter = load_adapter(EngineConfig(**config, default_sampling_params=SamplingParams(lora="ink:0.5")))
    assert adapter.defaults.lora == "ink:0.5"
    with pytest.raises(ConfigurationError, match="default_sampling_params: .*no adapter 'inc', did you mean 'ink'"):
        load_adapter(EngineConfig(**config, default_sampling_params=SamplingParams(lora="inc")))


def test_an_unknown_adapter_is_refused_before_the_request_is_queued(served: Served) -> None:
    adapter = served.adapter(served.build())
    request = with_lora(SD3.requests(adapter, 1)[0], "inc")
    with pytest.raises(FieldValueError, match="no adapter 'inc', did you mean 'ink'.*Known are: ink, night, wide"):
        adapter.check_request(request)
