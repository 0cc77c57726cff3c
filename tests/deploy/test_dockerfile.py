"""The Dockerfile: by hadolint, and by what it has to agree on with the project."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

from packaging.requirements import Requirement

from tests.deploy import compose
from tests.deploy.compose import GPU, ROOT

DOCKERFILE = (ROOT / "Dockerfile").read_text()
HADOLINT = Path(sys.executable).parent / "hadolint"


def instruction(name: str) -> str:
    """The last instruction of that name, on one line."""
    found = re.findall(rf"^{name} ((?:.*\\\n)*.*)", DOCKERFILE, re.MULTILINE)
    return " ".join(str(found[-1]).replace("\\\n", " ").split())


def test_hadolint_has_nothing_to_say() -> None:
    checked = subprocess.run([HADOLINT, ROOT / "Dockerfile"], capture_output=True, text=True)
    assert (checked.returncode, checked.stdout) == (0, "")


def test_hadolint_would_find_an_unpinned_image(tmp_path: Path) -> None:
    (tmp_path / "Dockerfile").write_text("FROM debian\nRUN cd /tmp\n")
    checked = subprocess.run([HADOLINT, tmp_path / "Dockerfile"], capture_output=True, text=True)
    assert checked.returncode == 1
    assert "DL3006" in checked.stdout


def test_it_runs_serve_without_root_and_signals_arrive() -> None:
    entrypoint = json.loads(instruction("ENTRYPOINT"))  # the exec form: no shell in between
    assert entrypoint[-2:] == ["triton-diffusion", "serve"]
    assert instruction("USER") == "1000:1000"
    assert instruction("STOPSIGNAL") == "SIGTERM"
    assert "ARG TRITON_VERSION=26.11\n" in DOCKERFILE


def test_its_health_check_is_that_of_the_compose_file() -> None:
    options, _, command = instruction("HEALTHCHECK").partition(" CMD ")
    check = compose.read(GPU)["services"]["triton"]["healthcheck"]
    assert ["CMD", *json.loads(command)] == check["test"]
    assert dict(option.removeprefix("--").split("=") for option in options.split()) == {
        "interval": check["interval"],
        "timeout": check["timeout"],
        "start-period": check["start_period"],
        "retries": str(check["retries"]),
    }


def test_the_builder_gets_what_is_copied() -> None:
    sent = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    copied = {word for line in re.findall(r"^COPY (.*) \S+$", DOCKERFILE, re.MULTILINE) for word in line.split()}
    bound = set(re.findall(r"type=bind,source=([^,]+)", DOCKERFILE))
    assert copied | bound == sent
    assert all((ROOT / name).exists() for name in sent)


def test_the_constraints_pin_all_that_is_installed() -> None:
    lines = (ROOT / "deploy/constraints.txt").read_text().splitlines()
    pinned = dict(line.lower().split("==") for line in lines if not line.startswith("#"))
    (listing,) = re.findall(r"python3 -c '([^']+)'", DOCKERFILE)
    listed = subprocess.run([sys.executable, "-c", listing], cwd=ROOT, capture_output=True, text=True, check=True)
    names = set()
    for text in listed.stdout.splitlines():
        requirement = Requirement(text)
        names.add(requirement.name.lower())
        assert requirement.specifier.contains(pinned[requirement.name.lower()]), text
    # What serves a model, what sends its spans to a collector, and what Qwen-Image-Edit needs.
    assert names >= {"tritonclient", "torch", "opentelemetry-sdk", "torchvision"}
