"""What the README shows of serving a model of one's own is what really comes of it."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from typer.testing import CliRunner

from tests.unit.test_deployment_options import plan
from triton_diffusion.cli import app
from triton_diffusion.deployment.repository import repository_files

SECTION = (Path(__file__).parents[2] / "README.md").read_text().partition("## Serve your own model")[2]


def block(language: str) -> str:
    """The first block of code in a language."""
    found = re.search(rf"^```{language}\n(.*?)^```$", SECTION, re.DOTALL | re.MULTILINE)
    assert found is not None
    return found[1]


def test_the_command_writes_the_files_that_are_shown() -> None:
    (command,) = block("bash").splitlines()
    shown = CliRunner().invoke(app, [*shlex.split(command)[1:], "--dry-run"], catch_exceptions=False)
    name = "stable-diffusion-3.5-medium"
    assert (
        shown.stdout
        == f"==> {name}/config.pbtxt <==\n{block('pbtxt')}\n==> {name}/1/model.py <==\n{block('python')}\n"
    )


def test_the_deploy_file_means_the_same_as_the_command(tmp_path: Path) -> None:
    (tmp_path / "deploy.yaml").write_text(block("yaml"))
    files = repository_files(plan(None, file=tmp_path / "deploy.yaml"))
    assert files[Path("stable-diffusion-3.5-medium/config.pbtxt")] == block("pbtxt")
