"""From what somebody gives, by command line or deploy file, to the options of a served model."""

from __future__ import annotations

import importlib.abc
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from triton_diffusion.__main__ import main
from triton_diffusion.cli import app
from triton_diffusion.config import PARAMETERS
from triton_diffusion.deployment import MODEL_OPTIONS, ServedModel, plan_models
from triton_diffusion.errors import ConfigurationError


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A directory that looks like a checkpoint: that is all that is asked of it before it is loaded."""
    return make_checkpoint(tmp_path / "my-model")


def make_checkpoint(path: Path) -> Path:
    path.mkdir(parents=True)
    (path / "model_index.json").write_text("{}")
    return path


def plan(model: str | Path | None, *named: str, file: Path | None = None, **given: Any) -> list[ServedModel]:
    """The planned models; what is warned of goes into `warnings` of this function."""
    warnings.clear()
    return plan_models(None if model is None else str(model), list(named), file, given, warnings.append)


warnings: list[str] = []


def test_every_parameter_of_config_pbtxt_is_an_option_of_the_command_line() -> None:
    for command in ("serve", "init"):
        shown = CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "80", "TERMINAL_WIDTH": "80"}).stdout
        words = re.split(r"[^a-z-]+", shown)
        for name in (*PARAMETERS, *MODEL_OPTIONS):
            assert name == "model" or f"--{name.replace('_', '-')}" in words, name


@pytest.mark.parametrize(
    ("given", "size", "warning"),
    [
        ({}, 1, None),
        ({"max_num_seqs": "4"}, 4, None),
        ({"diffusion_batch_size": "3"}, 3, "--diffusion-batch-size is deprecated; its name is --max-num-seqs now"),
        ({"max_num_seqs": "4", "diffusion_batch_size": "4"}, 4, "--diffusion-batch-size is deprecated"),
    ],
)
def test_the_capacity_has_one_source_under_either_name(
    checkpoint: Path, given: dict[str, Any], size: int, warning: str | None
) -> None:
    (model,) = plan(checkpoint, **given)
    assert model.max_num_seqs == size
    assert len(warnings) == (0 if warning is None else 1)
    assert warning is None or warning in warnings[0]


def test_two_names_with_two_values_are_an_error_naming_both(checkpoint: Path) -> None:
    with pytest.raises(ConfigurationError, match="--max-num-seqs=4 and --diffusion-batch-size=3 differ"):
        plan(checkpoint, max_num_seqs="4", diffusion_batch_size="3")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"max_num_seqs": "0"}, "--max-num-seqs=0: must be a whole number of at least 1"),
        ({"max_num_seqs": "many"}, "--max-num-seqs=many: must be a whole number"),
        ({"diffusion_batch_size": "-1"}, "--diffusion-batch-size=-1: must be a whole number"),
        ({"request_batch_max_wait_ms": "-1"}, "--request-batch-max-wait-ms=-1: must be a number of milliseconds"),
        ({"request_batch_max_wait_ms": "inf"}, "must be a number of milliseconds"),
        ({"instances": "0"}, "--instances=0: must be"),
        ({"gpus": "0;1"}, "--gpus=0;1: must be numbers of GPUs with commas"),
        ({"gpus": "0,0"}, "--gpus=0,0: names a GPU twice"),
        ({"gpus": "0", "device": "cuda:1"}, "gpus=0 and device=cuda:1: .* leave out one of the two"),
        ({"max_num_seqs": "99999999999999"}, "--max-num-seqs=99999999999999: must be at most 2147483647"),
        ({"request_batch_max_wait_ms": "1e300"}, "must be a number of milliseconds from 0 to 86400000, a day"),
        ({"gpus": "99999999999"}, "--gpus=99999999999: must be numbers of GPUs, at most"),
        ({"device": "gpu"}, "--device=gpu: must be auto, cpu, cuda, or cuda:1"),
        ({"name": "a/b"}, "--name=a/b: must be letters, digits"),
        ({"name": ""}, "--name=: must be letters, digits"),
        ({"dtype": "int8"}, "--dtype=int8: must be one of auto, float32"),
        ({"default_sampling_params": '{"steps": 3}'}, "unknown sampling parameter 'steps'"),
        ({"warmup_shapes": '{"height": 3}'}, "--warmup-shapes=.*must be a JSON list of objects"),
        ({"warmup_shapes": '[{"heigth": 3}]'}, "unknown sampling parameter 'heigth', did you mean 'height'"),
        ({"lora_directory": "nowhere"}, "lora_directory=nowhere: there is no "),
        ({"loras": '{"ink": "./nowhere"}'}, r"loras=\./nowhere: there is no "),
    ],
)
def test_a_wrong_value_is_named_with_what_is_allowed(checkpoint: Path, given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        plan(checkpoint, **given)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("nowhere", "nowhere: there is no such directory, and it is no hub id .ORGANISATION/NAME."),
        ("./no/where", "no such directory"),
        ("empty", "empty: the directory holds no model_index.json.*, and no .*config.pbtxt"),
        ("file", "file: is a file; give the directory that save_pretrained wrote"),
        ("repository/a", "no model_index.json.*, but a config.pbtxt: give the folder above it"),
    ],
)
def test_a_model_that_is_not_there_is_refused_with_what_was_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str, message: str
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    (tmp_path / "repository" / "a").mkdir(parents=True)
    (tmp_path / "repository" / "a" / "config.pbtxt").touch()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigurationError, match=message):
        plan(model)


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("stabilityai/stable-diffusion-3.5-medium", "stable-diffusion-3.5-medium"),
        ("me/_model_", "model_"),
    ],
)
def test_a_hub_id_stays_as_it_is_and_names_the_model(model: str, name: str) -> None:
    (planned,) = plan(model)
    assert (planned.model, planned.name) == (model, name)


def test_a_name_is_made_valid(tmp_path: Path) -> None:
    (model,) = plan(make_checkpoint(tmp_path / "my model (v2)"))
    assert model.name == "my_model_v2_"


def test_paths_of_the_command_line_are_relative_to_the_current_directory(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(checkpoint.parent)
    (checkpoint.parent / "loras").mkdir()
    (checkpoint.parent / "ink.safetensors").touch()
    (model,) = plan("my-model", lora_directory="loras", loras='{"ink": "ink.safetensors", "hub": "me/lora"}')
    assert model.model == str(checkpoint)
    assert model.parameters["lora_directory"] == str(checkpoint.parent / "loras")
    assert model.parameters["loras"] == f'{{"ink": "{checkpoint.parent / "ink.safetensors"}", "hub": "me/lora"}}'


def test_several_models_share_the_options_of_the_command_line(tmp_path: Path) -> None:
    for name in ("one", "two", "three=x"):
        make_checkpoint(tmp_path / name)
    models = plan(None, f"a={tmp_path / 'one'}", str(tmp_path / "two"), f"b={tmp_path / 'three=x'}", max_num_seqs="4")
    assert [(model.name, model.max_num_seqs) for model in models] == [("a", 4), ("two", 4), ("b", 4)]
    assert models[2].model == str(tmp_path / "three=x")


@pytest.mark.parametrize(
    ("model", "named", "given", "message"),
    [
        ("{}", ["a={}"], {}, "give MODEL, or --model for each"),
        (None, ["a={}", "a={}"], {}, "two models are called a; give each a name of its own"),
        (None, ["a={}", "A={}"], {}, "two models are called a; "),
        (None, ["a={}", "b={}"], {"name": "c"}, "--name c: there are 2 models; give --model NAME=MODEL"),
        (None, ["a b={}"], {}, "--model a b=.*: name=a b: must be letters"),
        (None, ["a="], {}, "model=: must be a directory or a hub id"),
        (None, [], {}, "no model to serve"),
    ],
)
def test_models_that_contradict_each_other_are_refused(
    checkpoint: Path, model: str | None, named: list[str], given: dict[str, Any], message: str
) -> None:
    model = None if model is None else model.format(checkpoint)
    with pytest.raises(ConfigurationError, match=message):
        plan(model, *(text.format(checkpoint) for text in named), **given)


def test_ctrl_c_before_the_command_is_imported_is_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupted(importlib.abc.MetaPathFinder):
        def find_spec(self, fullname: str, *_: object) -> None:
            if fullname == "triton_diffusion.cli":
                raise KeyboardInterrupt

    monkeypatch.delitem(sys.modules, "triton_diffusion.cli")
    monkeypatch.setattr(sys, "meta_path", [Interrupted(), *sys.meta_path])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 130
