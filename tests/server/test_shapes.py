"""The shipped model, served as the README says."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import PIL.Image
import pytest

from training.shapes.reader import read
from training.shapes.scenes import Scene
from triton_diffusion.embedded import TritonServer

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def shapes() -> Iterator[TritonServer]:
    with TritonServer(ROOT / "model_repository") as server:
        yield server


def code_blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)


def run(code: str, server: TritonServer, directory: Path, *command: str) -> None:
    """Run a piece of the documentation in `directory`, on the ports of `server`."""
    code = code.replace("localhost:8000", server.http_url).replace("localhost:8001", server.grpc_url)
    environment = {**os.environ, "TRITON_DIFFUSION_URL": server.grpc_url}
    subprocess.run([*command, code], cwd=directory, env=environment, check=True)


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
def test_the_readmes_curl_draws_a_small_green_star(shapes: TritonServer, tmp_path: Path) -> None:
    (curl,) = [block for block in code_blocks("bash") if "curl" in block]
    run(curl, shapes, tmp_path, "bash", "-euc")
    reading = read(PIL.Image.open(tmp_path / "star.png"))
    assert reading is not None
    assert reading.scene == Scene(size="small", colour="green", shape="star", background="white")


def test_the_readmes_command_line(shapes: TritonServer, tmp_path: Path) -> None:
    (command,) = [block for block in code_blocks("bash") if "triton-diffusion generate" in block]
    command = command.replace(".venv/bin/triton-diffusion", f"{sys.executable} -m triton_diffusion.cli")
    run(command, shapes, tmp_path, "sh", "-euc")
    names = sorted(path.name for path in (tmp_path / "pictures").iterdir())
    assert names == [
        "1-a-large-red-circle-on-a-white-background-seed7.png",
        "2-a-small-blue-star-on-a-yellow-background-seed7.png",
    ]


def test_the_readmes_python(shapes: TritonServer, tmp_path: Path) -> None:
    (code,) = [block for block in code_blocks("python") if "DiffusionClient" in block]
    run(code, shapes, tmp_path, sys.executable, "-c")
    assert len(list((tmp_path / "pictures").iterdir())) == 2


def test_the_quickstart(shapes: TritonServer, tmp_path: Path) -> None:
    run((ROOT / "examples" / "quickstart.py").read_text(), shapes, tmp_path, sys.executable, "-c")
    assert len(list((tmp_path / "pictures").iterdir())) == 3


def test_the_demo() -> None:
    finished = subprocess.run([sys.executable, "-m", "examples.demo"], cwd=ROOT, capture_output=True, text=True)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert "refused 'a small orange square" in finished.stdout
    assert "height=70: must be a multiple of 8; the nearest is 64 or 72" in finished.stdout
