"""Where the documentation is tried: a folder with what it speaks of, and one real server with all of its models."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from typer.testing import CliRunner

from tests.docs.markdown import ROOT, Block, blocks
from tests.tiny_loras import write_lora
from tests.tiny_pipelines import stable_diffusion_3
from triton_diffusion.cli import app
from triton_diffusion.embedded import TritonServer

HUB_ID = "stabilityai/stable-diffusion-3.5-medium"
FROM_MODEL_PY = "docs/from-model-py.md"


def only(page: str, language: str, text: str) -> Block:
    """The one block of a page and a language that holds `text`."""
    (found,) = [block for block in blocks(page) if block.language == language and text in block.text]
    return found


@dataclass(frozen=True)
class Workplace:
    """
    Args:
        folder: the current directory of the commands: `loras` and `model_repository` are in it.
        checkpoint: the tiny pipeline that stands for the hub id.
        server: serves `shapes`; `sd35`, as docs/from-model-py.md makes it; and `before`, the model.py that it was.
    """

    folder: Path
    checkpoint: Path
    server: TritonServer

    def with_addresses(self, text: str) -> str:
        """The text with the addresses of the running server."""
        for port, url in {
            8000: self.server.http_url,
            8001: self.server.grpc_url,
            8002: self.server.metrics_url,
        }.items():
            text = text.replace(f"localhost:{port}", url)
        return text

    def with_checkpoint(self, text: str) -> str:
        return text.replace(HUB_ID, str(self.checkpoint))


def build(folder: Path) -> Workplace:
    """Everything but the started server."""
    checkpoint, repository = folder / "checkpoint", folder / "served"
    pipeline = stable_diffusion_3()
    pipeline.save_pretrained(checkpoint)
    for number, name in enumerate(("ink", "night")):
        write_lora(pipeline, folder / "loras" / name, rank=4, seed=number)
    shutil.copytree(ROOT / "model_repository", repository)
    place = Workplace(folder, checkpoint, TritonServer(repository))
    _write_models_of_the_page(place, repository)
    return place


def _write_models_of_the_page(place: Workplace, repository: Path) -> None:
    """The models of docs/from-model-py.md: before, after, and after under the old names."""

    def write(path: str, *texts: str) -> None:
        (repository / path).parent.mkdir(parents=True, exist_ok=True)
        (repository / path).write_text(place.with_checkpoint("\n".join(texts)))

    write("before/config.pbtxt", only(FROM_MODEL_PY, "pbtxt", "dynamic_batching").text)
    write("before/1/model.py", only(FROM_MODEL_PY, "python", "DiffusionPipeline.from_pretrained").text)

    init = only(FROM_MODEL_PY, "bash", "triton-diffusion init").text.split()
    arguments = [place.with_checkpoint(word) for word in init[1:]]
    arguments[arguments.index("model_repository")] = str(repository)
    arguments += ["--lora-directory", str(place.folder / "loras"), "--lora-mixed", "--no-warmup"]  # for docs/lora.md
    ended = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert ended.exit_code == 0, ended.output
    own_class = only(FROM_MODEL_PY, "pbtxt", "pipeline_class").text
    write("sd35/config.pbtxt", (repository / "sd35/config.pbtxt").read_text(), own_class)
    write("sd35/1/house_style.py", only(FROM_MODEL_PY, "python", "class HouseStyle").text)

    write("sd35_old_names/config.pbtxt", only(FROM_MODEL_PY, "pbtxt", "ensemble").text)
    os.mkdir(repository / "sd35_old_names" / "1")
