"""What config.pbtxt says about the engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from google.protobuf import json_format, text_format
from tritonclient.grpc import model_config_pb2

from triton_diffusion.config import EngineConfig
from triton_diffusion.errors import ConfigurationError


def model_config(parameters: dict[str, str], **fields: Any) -> dict[str, Any]:
    entries = {name: {"string_value": value} for name, value in parameters.items()}
    return {"max_batch_size": 4, "parameters": entries, **fields}


def load(tmp_path: Path, parameters: dict[str, str], **fields: Any) -> EngineConfig:
    return EngineConfig.from_model_config(model_config(parameters, **fields), tmp_path)


def test_capacity_and_wait_are_tritons_own_fields(tmp_path: Path) -> None:
    config = load(tmp_path, {"model": "a/b"}, dynamic_batching={"max_queue_delay_microseconds": "20500"})
    assert (config.max_num_seqs, config.request_batch_max_wait_ms) == (4, 20.5)


def test_a_directory_is_looked_up_beside_model_py(tmp_path: Path) -> None:
    (tmp_path / "checkpoint").mkdir()
    assert load(tmp_path, {"model": "./checkpoint"}).model == str(tmp_path / "checkpoint")
    assert load(tmp_path, {"model": "stabilityai/stable-diffusion-3.5-medium"}).model.startswith("stabilityai/")


def test_a_model_in_the_home_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "checkpoint").mkdir()
    assert load(tmp_path / "elsewhere", {"model": "~/checkpoint"}).model == str(tmp_path / "checkpoint")


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({}, "parameter 'model' is missing: give a directory or a hub id"),
        ({"model": "./nowhere"}, r"model='./nowhere': .* is not a directory"),
        ({"model": "a/b", "dtpye": "bf16"}, "unknown parameter 'dtpye', did you mean 'dtype'"),
        ({"model": "a/b", "max_num_seqs": "4"}, "max_num_seqs is no parameter here: set max_batch_size"),
        ({"model": "a/b", "warmup_shapes": "{}"}, "warmup_shapes='{}': must be a JSON list of objects"),
        ({"model": "a/b", "warmup_shapes": "[1]"}, "must be a JSON list of objects"),
        ({"model": "a/b", "warmup_shapes": "[{"}, "must be a JSON list of objects"),
        (
            {"model": "a/b", "warmup_shapes": '[{"width": 64}]', "max_pixels": "4095"},
            "warmup_shapes: height=64 width=64 is more than max_pixels 4095.* set max_pixels to 4096",
        ),
        ({"model": "a/b", "device": "gpu"}, "device='gpu': must be auto, cpu, cuda, or cuda:1"),
        ({"model": "a/b", "dtype": "int8"}, "parameter dtype='int8': must be one of auto, float32"),
        ({"model": "a/b", "max_queue_size": "many"}, "max_queue_size='many': must be a whole number of at least 1"),
        ({"model": "a/b", "max_queue_size": "0"}, "max_queue_size='0': must be"),
        ({"model": "a/b", "strict_batch_key": "yes"}, "strict_batch_key='yes': must be true or false"),
        ({"model": "a/b", "loras": '{"ink": 3}'}, "parameter loras=.*'ink' must be a string, not 3"),
        ({"model": "a/b", "loras": "[]"}, "must be a JSON object"),
        ({"model": "a/b", "from_pretrained": "[1]"}, "from_pretrained=.*must be a JSON object"),
        ({"model": "a/b", "default_sampling_params": "{"}, "must be a JSON object"),
        ({"model": "a/b", "default_sampling_params": '{"steps": 3}'}, "unknown sampling parameter 'steps'"),
        ({"model": "a/b", "default_sampling_params": '{"height": -1}'}, "height=-1: must be an integer from 1"),
    ],
)
def test_a_wrong_parameter_is_named_with_its_remedy(tmp_path: Path, parameters: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        load(tmp_path, parameters)


def test_a_model_without_batch_dimension_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="max_batch_size=0: must be at least 1"):
        load(tmp_path, {"model": "a/b"}, max_batch_size=0)


def test_the_shipped_config_is_valid() -> None:
    path = Path(__file__).parents[2] / "model_repository" / "shapes" / "config.pbtxt"
    message = text_format.Parse(path.read_text(), model_config_pb2.ModelConfig())
    config = EngineConfig.from_model_config(
        json_format.MessageToDict(message, preserving_proto_field_name=True), path.parent / "1"
    )
    assert config.max_num_seqs == 8
    assert config.default_sampling_params.num_inference_steps == 20
