"""From a checkpoint directory to an adapter."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.example_requests import mixed_requests, stock_call
from tests.tiny_pipelines import stable_diffusion_3
from triton_diffusion.adapters import StableDiffusion3Adapter, load_adapter
from triton_diffusion.adapters.loading import resolve_device, resolve_dtype
from triton_diffusion.config import EngineConfig
from triton_diffusion.errors import ConfigurationError


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("checkpoint")
    stable_diffusion_3().save_pretrained(path)
    return path


def test_the_class_is_found_from_model_index_json(checkpoint: Path) -> None:
    adapter = load_adapter(EngineConfig(model=str(checkpoint)))
    assert isinstance(adapter, StableDiffusion3Adapter)
    request = mixed_requests(1)[0]
    again, original = (
        stock_call(pipeline, request, "latent") for pipeline in (adapter.pipeline, stable_diffusion_3())
    )
    assert torch.equal(again, original)


def test_a_checkpoint_without_t5_needs_no_arguments(tmp_path: Path) -> None:
    pipeline = stable_diffusion_3()
    pipeline.register_modules(text_encoder_3=None, tokenizer_3=None)
    pipeline.save_pretrained(tmp_path)
    adapter = load_adapter(EngineConfig(model=str(tmp_path)))
    request = mixed_requests(1)[0]
    assert torch.equal(stock_call(adapter.pipeline, request, "latent"), stock_call(pipeline, request, "latent"))


def test_arguments_for_from_pretrained_are_passed_on(checkpoint: Path) -> None:
    config = EngineConfig(model=str(checkpoint), from_pretrained={"text_encoder_3": None, "tokenizer_3": None})
    assert load_adapter(config).pipeline.text_encoder_3 is None


def test_the_dtype_of_the_config_is_the_pipelines(checkpoint: Path) -> None:
    assert load_adapter(EngineConfig(model=str(checkpoint), dtype="bfloat16")).pipeline.dtype == torch.bfloat16


def test_auto_is_bfloat16_on_a_gpu_and_float32_on_the_cpu() -> None:
    assert resolve_dtype("auto", torch.device("cuda")) == torch.bfloat16
    assert resolve_dtype("auto", torch.device("cpu")) == torch.float32


@pytest.mark.parametrize(
    ("kind", "gpu", "device"),
    [("GPU", True, "cuda:2"), ("MODEL", True, "cuda"), ("CPU", True, "cpu"), ("MODEL", False, "cpu")],
)
def test_auto_takes_the_instances_own_gpu(kind: str, gpu: bool, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    assert resolve_device(EngineConfig(model="m", kind=kind, device_id=2)) == torch.device(device)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model": "somebody/no-such-model"}, "model 'somebody/no-such-model' cannot be loaded"),
        ({"model": "m", "device": "tpu0"}, "parameter device='tpu0'"),
        ({"model": "m", "device": "cuda"}, "parameter device='cuda': torch finds no GPU here"),
    ],
)
def test_what_cannot_be_loaded_is_named(config: dict[str, str], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigurationError, match=message):
        load_adapter(EngineConfig(**config))  # type: ignore[arg-type]


def test_a_folder_that_is_no_checkpoint_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="cannot be loaded.*model_index.json"):
        load_adapter(EngineConfig(model=str(tmp_path)))
