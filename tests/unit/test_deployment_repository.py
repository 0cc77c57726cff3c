"""The model repository that is written: protobuf's own parser reads what was meant."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from google.protobuf import json_format, text_format
from tritonclient.grpc import model_config_pb2
from typer.testing import CliRunner

from tests.unit.test_deployment_options import make_checkpoint, plan
from triton_diffusion.cli import app
from triton_diffusion.config import EngineConfig
from triton_diffusion.deployment import write_repository
from triton_diffusion.errors import ConfigurationError


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return make_checkpoint(tmp_path / "sd3")


def parsed(path: Path) -> Any:
    """As Triton reads it."""
    return text_format.Parse(path.read_text(), model_config_pb2.ModelConfig())


def engine_config(path: Path) -> EngineConfig:
    """As the engine reads it."""
    values = json_format.MessageToDict(parsed(path), preserving_proto_field_name=True)
    return EngineConfig.from_model_config(values, path.parent / "1")


def test_it_says_what_was_asked_for(checkpoint: Path, tmp_path: Path) -> None:
    models = plan(
        checkpoint, max_num_seqs="4", request_batch_max_wait_ms="20.5", step_execution=True, dtype="bf16", warmup=False
    )
    config, model_py = write_repository(tmp_path / "repository", models)
    assert (config, model_py) == (
        tmp_path / "repository" / "sd3" / "config.pbtxt",
        tmp_path / "repository" / "sd3" / "1" / "model.py",
    )
    message = parsed(config)
    assert (message.backend, message.max_batch_size) == ("python", 4)
    assert message.dynamic_batching.max_queue_delay_microseconds == 20500
    assert [(group.kind, group.count) for group in message.instance_group] == [
        (model_config_pb2.ModelInstanceGroup.KIND_MODEL, 1)
    ]
    assert engine_config(config) == EngineConfig(
        model=str(checkpoint),
        max_num_seqs=4,
        request_batch_max_wait_ms=20.5,
        step_execution=True,
        dtype="bfloat16",
        warmup=False,
        directory=config.parent / "1",
    )
    lines = config.read_text().splitlines()
    assert len(lines) < 40
    assert all(len(line) < 120 for line in lines if str(tmp_path) not in line)
    assert "TritonPythonModel" in model_py.read_text()


def test_nothing_that_was_not_given_is_written(checkpoint: Path, tmp_path: Path) -> None:
    (config, _) = write_repository(tmp_path / "repository", plan(checkpoint))
    message = parsed(config)
    assert message.max_batch_size == 1
    assert message.HasField("dynamic_batching")
    assert dict(message.parameters).keys() == {"model"}


@pytest.mark.parametrize(
    ("given", "group"),
    [
        ({"instances": "3"}, {"kind": "KIND_MODEL", "count": 3}),
        ({"instances": "2", "device": "cpu"}, {"kind": "KIND_CPU", "count": 2}),
        ({"gpus": "0,2"}, {"kind": "KIND_GPU", "count": 1, "gpus": [0, 2]}),
        ({"gpus": "1", "instances": "2"}, {"kind": "KIND_GPU", "count": 2, "gpus": [1]}),
    ],
)
def test_instances_and_gpus_are_an_instance_group(
    checkpoint: Path, tmp_path: Path, given: dict[str, Any], group: dict[str, object]
) -> None:
    (config, _) = write_repository(tmp_path / "repository", plan(checkpoint, **given))
    (written,) = parsed(config).instance_group
    assert json_format.MessageToDict(written) == group


@pytest.mark.parametrize("name", ["quotes \" and ' both", "back\\slash", "new\nline", "日本 é", "a'b", "# {}[]"])
def test_any_text_is_read_back_as_it_was(tmp_path: Path, name: str) -> None:
    checkpoint = make_checkpoint(tmp_path / name)
    (config, _) = write_repository(
        tmp_path / "repository", plan(checkpoint, name="x", from_pretrained='{"a": "\\u00e9\\"\'"}')
    )
    assert engine_config(config).model == str(checkpoint)
    assert engine_config(config).from_pretrained == {"a": "é\"'"}


def test_a_model_that_is_there_is_not_written_over_unless_forced(checkpoint: Path, tmp_path: Path) -> None:
    repository = tmp_path / "repository"
    (config, _) = write_repository(repository, plan(checkpoint))
    write_repository(repository, plan(checkpoint))  # the same again
    other = plan(None, f"new={checkpoint}", f"sd3={checkpoint}", max_num_seqs="4")
    with pytest.raises(ConfigurationError, match="repository/sd3 is there already, and not the same; give --force"):
        write_repository(repository, other)
    assert not (repository / "new").exists(), "nothing is written by halves"
    assert parsed(config).max_batch_size == 1
    write_repository(repository, other, force=True)
    assert parsed(config).max_batch_size == 4


def test_the_folder_of_a_class_of_ones_own_is_on_the_path_of_its_model(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.py").touch()
    monkeypatch.chdir(tmp_path)
    (_, model_py) = write_repository(tmp_path / "repository", plan(checkpoint, pipeline_class="mine:Class"))
    assert f"sys.path.insert(0, {str(tmp_path)!r})" in model_py.read_text()
    (_, model_py) = write_repository(tmp_path / "other", plan(checkpoint, pipeline_class="installed:Class"))
    assert "sys.path" not in model_py.read_text()


def test_a_dry_run_shows_every_file_and_writes_none(checkpoint: Path, tmp_path: Path) -> None:
    repository = tmp_path / "repository"
    command = ["serve", str(checkpoint), "--max-num-seqs", "4", "--repository", str(repository), "--dry-run"]
    shown = CliRunner().invoke(app, command)
    assert shown.exit_code == 0
    assert not repository.exists()
    written = CliRunner().invoke(app, ["init", str(repository), str(checkpoint), "--max-num-seqs", "4"])
    paths = [Path(line) for line in written.stdout.splitlines()]
    assert shown.stdout == "".join(f"==> {path} <==\n{path.read_text()}\n" for path in paths)
    again = CliRunner().invoke(app, ["serve", str(repository), "--dry-run"])
    assert again.stdout == f"==> {paths[0]} <==\n{paths[0].read_text()}\n", "served as it is"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--max-num-seqs", "3"], "--max-num-seqs: .* is a Triton model repository.*set max_batch_size in its config"),
        (["--name", "x"], "--name: .* as they are; rename its folder"),
        (["--force"], "--force: .* is a Triton model repository, which is served as it is"),
        (["--no-warmup"], "--warmup: .*set parameter warmup in its config.pbtxt"),
        (["--gpus", "0"], "set instance_group .* in its config.pbtxt"),
        (["--repository", "x"], "--repository x: .* is a Triton model repository"),
        (["--config", "x.yaml"], "--config x.yaml: .* is a Triton model repository"),
        (["--model", "a=b/c"], "--model a=b/c: .* is a Triton model repository"),
    ],
)
def test_options_of_a_model_are_no_options_of_a_repository(
    checkpoint: Path, tmp_path: Path, arguments: list[str], message: str
) -> None:
    repository = tmp_path / "repository"
    write_repository(repository, plan(checkpoint))
    ended = CliRunner().invoke(app, ["serve", str(repository), *arguments, "--dry-run"])
    assert isinstance(ended.exception, ConfigurationError)
    with pytest.raises(ConfigurationError, match=message):
        raise ended.exception


def test_without_arguments_it_serves_the_default_repository(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    ended = CliRunner().invoke(app, ["serve", "--dry-run"])
    with pytest.raises(ConfigurationError, match="nothing to serve: give .*./model_repository, the default, is not"):
        raise ended.exception or AssertionError
    write_repository(tmp_path / "model_repository", plan(checkpoint))
    assert "==> model_repository/sd3/config.pbtxt <==" in CliRunner().invoke(app, ["serve", "--dry-run"]).stdout


def test_a_folder_with_other_models_is_not_served_by_the_name_of_one(checkpoint: Path, tmp_path: Path) -> None:
    repository = tmp_path / "repository"
    write_repository(repository, plan(checkpoint, name="other"))
    for more in ([], ["--dry-run"]):
        ended = CliRunner().invoke(app, ["serve", str(checkpoint), "--repository", str(repository), *more])
        with pytest.raises(ConfigurationError, match="--repository .*: holds other too, which would be served"):
            raise ended.exception or AssertionError
    assert not (repository / "sd3").exists()


@pytest.mark.parametrize("more", [[], ["--dry-run"]])
def test_a_folder_below_a_file_is_refused(checkpoint: Path, tmp_path: Path, more: list[str]) -> None:
    (tmp_path / "file").touch()
    ended = CliRunner().invoke(app, ["serve", str(checkpoint), "--repository", str(tmp_path / "file" / "x"), *more])
    with pytest.raises(ConfigurationError, match="file/x: .*/file is a file; the model repository is a folder"):
        raise ended.exception or AssertionError


def test_a_folder_that_cannot_be_made_is_one_line(checkpoint: Path) -> None:
    ended = CliRunner().invoke(app, ["init", "/proc/x", str(checkpoint)])
    with pytest.raises(ConfigurationError, match="^/proc/x.*(cannot be written|choose another folder)"):
        raise ended.exception or AssertionError


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--http-port", "99999"], "--http-port 99999: must be from 0 to 65535"),
        (["--grpc-port", "8000"], "--grpc-port 8000: --http-port is the same; give each a port of its own"),
        (["--host", "no host"], "--host no host: is no address"),
        (["--exit-timeout", "-1"], "--exit-timeout -1: must be seconds from 0 to 86400"),
        (["--exit-timeout", "nan"], "--exit-timeout nan: must be seconds"),
        (["--triton-option", "log-verbose"], "--triton-option log-verbose: must be NAME=VALUE"),
        (["--triton-option", "http-port=1"], "--triton-option http-port=1: give --http-port instead"),
        (["--triton-option", "id=x"], "--triton-option id=x: serve needs id for itself"),
    ],
)
def test_options_of_the_server_are_checked_in_a_dry_run_too(
    checkpoint: Path, arguments: list[str], message: str
) -> None:
    ended = CliRunner().invoke(app, ["serve", str(checkpoint), *arguments, "--dry-run"])
    with pytest.raises(ConfigurationError, match=message):
        raise ended.exception or AssertionError


def test_free_ports_are_not_the_same_port(checkpoint: Path) -> None:
    ports = ["--http-port", "0", "--grpc-port", "0", "--metrics-port", "0"]
    assert CliRunner().invoke(app, ["serve", str(checkpoint), *ports, "--dry-run"]).exit_code == 0
