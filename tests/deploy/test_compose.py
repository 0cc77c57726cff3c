"""The compose files: by the official schema, and by what a server on a shared machine should keep to."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.deploy import compose
from tests.deploy.compose import CPU, GPU, REPOSITORY, ROOT, seconds, words


@pytest.mark.parametrize("files", [GPU, CPU, REPOSITORY])
def test_the_files_are_what_the_compose_specification_allows(files: tuple[str, ...], tmp_path: Path) -> None:
    merged = tmp_path / "compose.json"
    merged.write_text(json.dumps(compose.read(files)))
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec", str(merged)]
    checked = subprocess.run(command, capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout


def test_the_specification_would_find_a_misspelt_key(tmp_path: Path) -> None:
    wrong = compose.read(GPU)
    wrong["services"]["triton"]["shm_sizes"] = "2gb"
    (tmp_path / "compose.json").write_text(json.dumps(wrong))
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec"]
    checked = subprocess.run([*command, str(tmp_path / "compose.json")], capture_output=True, text=True)
    assert checked.returncode == 1
    assert "shm_sizes" in checked.stdout


def services() -> dict[str, dict[str, Any]]:
    return dict(compose.read(GPU)["services"])


@pytest.mark.parametrize("name", ["triton", "prometheus", "grafana"])
def test_what_listens_is_hardened_and_reachable_from_this_machine_alone(name: str) -> None:
    service = services()[name]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert service["restart"] == "unless-stopped"
    assert all(port.startswith("127.0.0.1:") for port in service["ports"])
    assert seconds(service["healthcheck"]["timeout"]) > 0


def test_every_file_that_is_mounted_is_there_and_read_only() -> None:
    bound = [entry for service in services().values() for entry in service.get("volumes", ()) if entry[0] == "."]
    assert len(bound) == 5
    for entry in bound:
        source, _, mode = entry.split(":")
        assert (ROOT / source).is_dir()
        assert mode == "ro"
    named = {entry.split(":")[0] for service in services().values() for entry in service.get("volumes", ())}
    assert named - {entry.split(":")[0] for entry in bound} == set(compose.read(GPU)["volumes"])


def test_images_are_pinned() -> None:
    for service in services().values():
        tag = service["image"].rpartition(":")[2]
        assert any(letter.isdigit() for letter in tag), service["image"]
    assert services()["perf-analyzer"]["image"].startswith("nvcr.io/nvidia/tritonserver:26.11-py3")


def test_the_monitoring_and_the_load_are_profiles() -> None:
    assert {name: service.get("profiles") for name, service in services().items()} == {
        "triton": None,
        "prometheus": ["monitoring"],
        "grafana": ["monitoring"],
        "perf-analyzer": ["bench"],
    }


def test_a_gpu_is_reserved_but_not_in_the_cpu_variant() -> None:
    (device,) = services()["triton"]["deploy"]["resources"]["reservations"]["devices"]
    assert device == {"driver": "nvidia", "count": "all", "capabilities": ["gpu"]}
    assert "deploy" not in compose.read(CPU)["services"]["triton"]


def test_docker_waits_longer_than_the_server_takes_to_stop_and_to_say_that_it_is_ill() -> None:
    service = services()["triton"]
    arguments = words(service["command"])
    exit_timeout = float(arguments[arguments.index("--exit-timeout") + 1])
    assert seconds(service["stop_grace_period"]) >= exit_timeout + 10
    check = service["healthcheck"]
    assert seconds(check["timeout"]) > float(check["test"][check["test"].index("--timeout") + 1])


EXAMPLE = (ROOT / ".env.example").read_text().splitlines()


def test_the_example_environment_has_every_variable_with_its_default() -> None:
    example = dict(line.split("=", 1) for line in EXAMPLE if line and not line.startswith("#"))
    defaults = compose.variables()
    assert {name: {value} for name, value in example.items()} == defaults
    for files in (GPU, CPU, REPOSITORY):
        assert compose.read(files, example) == compose.read(files)


def test_the_example_environment_names_what_the_container_gets_only_if_it_is_set() -> None:
    passed_on = {name for name, value in services()["triton"]["environment"].items() if value is None}
    assert passed_on == {line[1:].split("=")[0] for line in EXAMPLE if line.startswith("#") and line[1:2].isupper()}
    assert passed_on >= {"HF_TOKEN", "OTEL_EXPORTER_OTLP_ENDPOINT"}


@pytest.mark.parametrize("files", [GPU, CPU])
@pytest.mark.parametrize("environment", [{}, {"MODEL_NAME": "mine"}])
def test_the_load_goes_to_the_model_that_is_served(files: tuple[str, ...], environment: dict[str, str]) -> None:
    asked = compose.read(files, environment)["services"]
    serve, load = words(asked["triton"]["command"]), words(asked["perf-analyzer"]["command"])
    served = [serve[serve.index("--name") + 1]] if "--name" in serve else os.listdir(ROOT / "model_repository")
    assert [load[load.index("-m") + 1]] == served


@pytest.mark.parametrize("files", [CPU, REPOSITORY])
def test_serve_takes_a_model_repository_as_it_is(files: tuple[str, ...]) -> None:
    environment = {"MODEL": "someone/a-model", "MODEL_NAME": "mine", "MAX_NUM_SEQS": "6"}  # of no use here
    arguments = words(compose.read(files, environment)["services"]["triton"]["command"])
    assert arguments[0] == "/models"
    command = [sys.executable, "-m", "triton_diffusion.cli", "serve", str(ROOT / "model_repository"), *arguments[1:]]
    shown = subprocess.run([*command, "--dry-run"], capture_output=True, text=True, check=True).stdout
    assert "shapes" in shown


def test_serve_takes_the_command_and_writes_what_the_variables_say() -> None:
    environment = {"MODEL": str(ROOT / "model_repository/shapes/1/checkpoint"), "MODEL_NAME": "mine"}
    environment |= {"MAX_NUM_SEQS": "6", "SERVE_OPTIONS": "--step-execution --dtype float32"}
    arguments = words(compose.read(GPU, environment)["services"]["triton"]["command"])
    command = [sys.executable, "-m", "triton_diffusion.cli", "serve", *arguments, "--dry-run"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "mine/config.pbtxt" in shown
    assert "max_batch_size: 6" in shown
    assert "step_execution" in shown
    assert "float32" in shown
