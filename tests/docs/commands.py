"""How each command of the documentation is tried: by its first word. A word that is not in `COMMANDS` fails."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from tests.deploy import compose
from tests.docs.markdown import ROOT, Block
from tests.docs.workplace import Workplace
from triton_diffusion.cli import app


def commands(block: Block) -> list[str]:
    """The commands of a block: its lines, joined where they end with a backslash, without comments."""
    lines = re.sub(r"\\\n\s*", "", block.text).splitlines()
    found = [re.sub(r"(^|\s+)#\s.*$", "", line).strip() for line in lines]
    return [command for command in found if command]


def try_command(command: str, place: Workplace) -> None:
    name = Path(command.split()[0]).name
    assert name in COMMANDS, f"{command!r}: tests/docs/commands.py does not know how to try {name}"
    COMMANDS[name](command, place)


def run_triton_diffusion(command: str, place: Workplace) -> None:
    """Run, with the addresses of the running server; what would start a server shows what it would serve."""
    _, subcommand, *arguments = shlex.split(place.with_addresses(command))
    if subcommand == "serve":
        arguments.append("--dry-run")
    if subcommand == "init":
        arguments = [place.with_checkpoint(argument) for argument in arguments]
    environment = {"TRITON_DIFFUSION_URL": place.server.grpc_url}
    ended = CliRunner().invoke(app, [subcommand, *arguments], env=environment, catch_exceptions=False)
    assert ended.exit_code == 0, ended.output
    if subcommand == "serve":
        assert "==>" in ended.stdout


def run_in_shell(command: str, place: Workplace) -> None:
    """Run as it is, with the addresses of the running server."""
    if shutil.which(command.split()[0]) is None:
        pytest.skip(f"there is no {command.split()[0]} here")
    subprocess.run(["bash", "-euo", "pipefail", "-c", place.with_addresses(command)], check=True)


def is_a_target(command: str, _place: Workplace) -> None:
    """Not run (training takes an hour): make has to know the target."""
    subprocess.run(["make", "--dry-run", *shlex.split(command)[1:]], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)


def names_files_of_this_repository(command: str, _place: Workplace) -> None:
    """Not run: what looks like a path of the repository has to be one."""
    folders = {path.name for path in ROOT.iterdir()}
    for word in re.split(r"[\s=]+", command):
        if Path(word).parts and Path(word).parts[0] in folders:
            assert (ROOT / word).exists(), f"{command!r}: there is no {word}"


def is_compose(command: str, _place: Workplace) -> None:
    """Not run, for want of a container engine: its files, profiles and services have to be there."""
    words = shlex.split(command)
    assert words[1] in ("compose", "build", "run"), command
    if words[1] != "compose":
        return
    files, known = [], {"up", "down", "run", "build", "ps", "logs", "--rm", "--detach", "-d", "--volumes", "--build"}
    profiles, rest = [], iter(words[2:])
    services = []
    for word in rest:
        if word in ("-f", "--file"):
            files.append(next(rest))
        elif word == "--profile":
            profiles.append(next(rest))
        elif word not in known:
            services.append(word)
    read = compose.read(tuple(files) or compose.GPU)["services"]
    assert set(profiles) <= {name for service in read.values() for name in service.get("profiles", [])}
    assert set(services) <= set(read), command


def is_kubectl(command: str, place: Workplace) -> None:
    """Not run, for want of a cluster: its files and namespace have to be those of the manifests."""
    names_files_of_this_repository(command, place)
    kustomization = yaml.safe_load((ROOT / "deploy/kubernetes/kustomization.yaml").read_text())
    for namespace in re.findall(r"(?:--namespace|-n|namespace|namespaces/)[ /]?([a-z][a-z-]+)", command):
        assert namespace == kustomization["namespace"], command


def is_pip(command: str, _place: Workplace) -> None:
    """Not run: the extras have to be there."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for named in re.findall(r"\[([\w,-]+)\]", command):
        assert set(named.split(",")) <= set(extras), command


RUN: dict[str, Callable[[str, Workplace], None]] = {
    "curl": run_in_shell,
    "triton-diffusion": run_triton_diffusion,
}

CHECKED: dict[str, Callable[[str, Workplace], None]] = {
    "cp": names_files_of_this_repository,
    "docker": is_compose,
    "helm": names_files_of_this_repository,
    "kubectl": is_kubectl,
    "make": is_a_target,
    "perf_analyzer": names_files_of_this_repository,  # no package of it runs everywhere
    "pip": is_pip,
}
"""Commands that are not run here: what they name has to be there."""

COMMANDS = {**RUN, **CHECKED}
