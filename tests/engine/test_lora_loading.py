"""LoRA adapters are read and checked when the model loads: what can be served, and what is refused by its name."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.engine.served_loras import Served, with_lora
from tests.engine.staggered import TOGETHER, difference, run_staggered
from tests.families import BY_NAME
from tests.tiny_loras import FEED_FORWARD, load_into_stock, set_stock_adapters, write_lora
from tests.tiny_other_pipelines import aura_flow
from tests.tiny_pipelines import flux, pixart_alpha, stable_diffusion, stable_diffusion_3
from triton_diffusion.adapters.loading import load_adapter
from triton_diffusion.config import EngineConfig
from triton_diffusion.errors import ConfigurationError
from triton_diffusion.lora import LoraSelection
from triton_diffusion.lora.files import find_loras
from triton_diffusion.lora.loading import load_loras
from triton_diffusion.lora.row_loras import RowLoras
from triton_diffusion.lora.wave_loras import WaveLoras
from triton_diffusion.request import OmniDiffusionRequest
from triton_diffusion.sampling_params import SamplingParams

WAN_FILES = ("high_noise_model.safetensors", "low_noise_model.safetensors")

MODES = pytest.mark.parametrize("mixed", [False, True], ids=["waves", "mixed"])


def load(directory: Path, pipeline: Any = None, **config: Any) -> Any:
    pipeline = pipeline or stable_diffusion_3()
    engine_config = EngineConfig(model="tiny", lora_directory=str(directory), **config)
    return load_loras(pipeline, find_loras(str(directory), {}, Path()), engine_config)


def test_an_adapter_of_another_pipeline_is_named(tmp_path: Path) -> None:
    write_lora(flux(), tmp_path / "ink", rank=2, seed=0, targets=("single_transformer_blocks.0.attn.to_q",))
    with pytest.raises(ConfigurationError, match=r"lora 'ink' \(.*ink/pytorch_lora.*StableDiffusion3Pipeline"):
        load(tmp_path)


def test_an_adapter_for_a_larger_model_is_named(tmp_path: Path) -> None:
    folder = write_lora(stable_diffusion_3(), tmp_path / "ink", rank=2, seed=0)
    rewrite(folder, lambda name, tensor: torch.zeros(2, 96) if name.endswith("to_q.lora_A.weight") else tensor)
    with pytest.raises(ConfigurationError, match=r"lora 'ink' .*cannot be loaded into StableDiffusion3Pipeline"):
        load(tmp_path)


def test_an_adapter_that_binds_no_layer_is_named(tmp_path: Path) -> None:
    (tmp_path / "ink").mkdir()
    save_file({"lora_te9.x.lora_A.weight": torch.zeros(2, 2)}, tmp_path / "ink" / "a.safetensors")
    with pytest.raises(ConfigurationError, match=r"lora 'ink'"):
        load(tmp_path)


def test_an_adapter_that_is_not_finite_is_named(tmp_path: Path) -> None:
    folder = write_lora(stable_diffusion_3(), tmp_path / "ink", rank=2, seed=0)
    rewrite(folder, lambda _, tensor: torch.full_like(tensor, float("nan")))
    with pytest.raises(ConfigurationError, match=r"lora 'ink' .*holds NaN or infinity"):
        load(tmp_path)


def test_a_file_that_is_cut_off_is_named(tmp_path: Path) -> None:
    folder = write_lora(stable_diffusion_3(), tmp_path / "ink", rank=2, seed=0)
    file = folder / "pytorch_lora_weights.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ConfigurationError, match=r"lora 'ink'"):
        load(tmp_path)


def test_dora_is_served_in_waves_of_one_adapter_and_not_in_mixed_ones(tmp_path: Path) -> None:
    write_lora(stable_diffusion_3(), tmp_path / "dora", rank=2, seed=0, use_dora=True)
    assert isinstance(load(tmp_path), WaveLoras)
    with pytest.raises(ConfigurationError, match=r"lora 'dora' is more than a product.*set lora_mixed to false"):
        load(tmp_path, lora_mixed=True)


def test_dots_in_names_and_any_ranks_beside_each_other(tmp_path: Path) -> None:
    for rank, name in ((1, "v1.0"), (16, "v1.1"), (5, "v1-2")):
        write_lora(stable_diffusion_3(), tmp_path / name, rank=rank, seed=rank, targets=FEED_FORWARD)
    loras = load(tmp_path, lora_mixed=True)
    assert isinstance(loras, RowLoras)
    assert loras.names == ("v1-2", "v1.0", "v1.1")


@MODES
@pytest.mark.parametrize("files", [WAN_FILES, WAN_FILES[1:]], ids=["both", "the second one alone"])
def test_an_adapter_for_wan_2_2s_two_transformers(tmp_path: Path, mixed: bool, files: tuple[str, ...]) -> None:
    family = BY_NAME["Wan2.2"]
    stock = family.build()
    for file in files:
        second = "low_noise" in file
        write_lora(
            family.build(), tmp_path / "ink", rank=2 + second, seed=int(second), transformer_2=second, file=file
        )
        stock.load_lora_weights(tmp_path / "ink", weight_name=file, adapter_name="ink", load_into_transformer_2=second)
    served = Served(family, family.build, stock, tmp_path)
    adapter = served.adapter(family.build(), lora_mixed=mixed)
    requests = served.requests(adapter, ("ink", "ink:0.5"))
    run_staggered(adapter, requests, TOGETHER)
    for request in requests:
        assert difference(adapter.latents[request.request_id], served.stock_call(request)) <= 1e-5


def test_a_pipeline_that_takes_no_adapters(tmp_path: Path) -> None:
    (tmp_path / "ink.safetensors").touch()
    with pytest.raises(ConfigurationError, match="LoRA adapters: PixArtAlphaPipeline takes none"):
        load(tmp_path, pixart_alpha())


def test_weights_that_fit_no_layer_are_said_with_the_name_of_their_adapter(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = write_lora(stable_diffusion_3(), tmp_path / "ink", rank=2, seed=0)
    file = folder / "pytorch_lora_weights.safetensors"
    blocks = ("transformer_blocks.1.", "transformer_blocks.7.")
    save_file({name.replace(*blocks): tensor for name, tensor in load_file(file).items()}, file)
    with caplog.at_level(logging.WARNING, "triton_diffusion"):
        load(tmp_path)
    (message,) = [record.getMessage() for record in caplog.records if record.name.startswith("triton_diffusion")]
    assert "lora 'ink'" in message
    assert "transformer_blocks.7.attn.to_q" in message


@MODES
def test_dropout_is_for_training(tmp_path: Path, mixed: bool) -> None:
    write_lora(stable_diffusion_3(), tmp_path / "ink", rank=4, seed=0, dropout=0.5)
    family = BY_NAME["StableDiffusion3"]
    adapter = Served(family, family.build, None, tmp_path).adapter(family.build(), lora_mixed=mixed)
    request = with_lora(family.requests(adapter, 1)[0], "ink")
    run_staggered(adapter, [request], TOGETHER)
    run_staggered(adapter, [request], TOGETHER)
    once, again = adapter.latents[request.request_id]
    assert torch.equal(once, again)


@pytest.mark.parametrize(
    ("switch", "arguments", "reason"),
    [
        ("transformer.fuse_qkv_projections", {}, "the layers that adapters change are no longer used"),
        ("enable_sequential_cpu_offload", {}, "enable_model_cpu_offload keeps them"),
        ("transformer.compile_repeated_blocks", {"fullgraph": True}, "leave fullgraph out"),
    ],
)
def test_switches_that_do_not_go_with_adapters(
    tmp_path: Path, switch: str, arguments: dict[str, bool], reason: str
) -> None:
    (tmp_path / "ink.safetensors").touch()
    config = EngineConfig(
        model="tiny", lora_directory=str(tmp_path), lora_mixed=True, pipeline_calls={switch: arguments}
    )
    with pytest.raises(ConfigurationError, match=f"{switch}: cannot be used with LoRA adapters: .*{reason}"):
        load_adapter(config)


def rewrite(folder: Path, change: Callable[[str, torch.Tensor], torch.Tensor]) -> None:
    """Change each tensor of an adapter."""
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
        set_stock_adapters(stock, LoraSelection.of(wanted.sampling_params))
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
