"""Writes a Triton model repository: for each model a config.pbtxt that people can read, and 1/model.py."""

from __future__ import annotations

import os
import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from google.protobuf import json_format, text_encoding, text_format
from tritonclient.grpc import model_config_pb2

from triton_diffusion.config import PARAMETERS, EngineConfig
from triton_diffusion.deployment.served_model import ServedModel
from triton_diffusion.errors import ConfigurationError

MODEL_PY = """\
from triton_diffusion.python_backend.model import TritonPythonModel

__all__ = ["TritonPythonModel"]
"""


def repository_files(models: Iterable[ServedModel]) -> dict[Path, str]:
    """The text of each file, by its path in the repository.

    Raises:
        ConfigurationError: what they say cannot be served.
    """
    files = {}
    for model in models:
        config = render_config(model)
        _check(config)
        files[Path(model.name, "config.pbtxt")] = config
        files[Path(model.name, "1", "model.py")] = _import_path(model) + MODEL_PY
    return files


def write_repository(directory: Path, models: Sequence[ServedModel], *, force: bool = False) -> list[Path]:
    """Write the files, and return their paths.

    Args:
        force: write over files that say something else.

    Raises:
        ConfigurationError: a model of that name is there already; nothing is written.
    """
    files = repository_files(models)
    check_can_write(directory, files, force=force)
    written = []
    for path, text in files.items():
        written.append(directory / path)
        try:
            written[-1].parent.mkdir(parents=True, exist_ok=True)
            written[-1].write_text(text)
        except OSError as error:
            raise ConfigurationError(
                f"{written[-1]}: cannot be written: {error.strerror}; choose another folder"
            ) from None
    return written


def check_can_write(directory: Path, files: Mapping[Path, str], *, force: bool) -> None:
    """
    Args:
        files: the text of each file, by its path in the repository.

    Raises:
        ConfigurationError: a model of that name is there already, and is another one; or nothing can be written there.
    """
    nearest = next(path for path in (directory, *directory.absolute().parents) if path.exists())
    if not nearest.is_dir():
        raise ConfigurationError(f"{directory}: {nearest} is a file; the model repository is a folder")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise ConfigurationError(f"{directory}: {nearest} cannot be written to; choose another folder")
    for name in dict.fromkeys(path.parts[0] for path in files):
        same = all(
            (directory / path).is_file() and (directory / path).read_text() == text
            for path, text in files.items()
            if path.parts[0] == name
        )
        if (directory / name).exists() and not same and not force:
            raise ConfigurationError(
                f"{directory / name} is there already, and not the same; give --force to write over it, another "
                "--name or another folder"
            )


def show_files(files: Mapping[Path, str]) -> None:
    """Print each file below its path."""
    for path, text in files.items():
        print(f"==> {path} <==\n{text}")


def render_config(model: ServedModel) -> str:
    """The text of config.pbtxt."""
    return "\n".join(_lines(model)) + "\n"


def _lines(model: ServedModel) -> Iterator[str]:
    yield 'backend: "python"'
    yield ""
    yield "# The most requests of one wave: max_num_seqs. Nothing else sets it."
    yield f"max_batch_size: {model.max_num_seqs}"
    yield ""
    if model.request_batch_max_wait_ms:
        yield f"# How long the first request waits for company: request_batch_max_wait_ms {_wait(model)}."
        yield f"dynamic_batching {{ max_queue_delay_microseconds: {_microseconds(model)} }}"
    else:
        yield "# No request waits for company (request_batch_max_wait_ms 0)."
        yield "dynamic_batching { }"
    yield ""
    yield "# Each instance is one engine with its own copy of the pipeline" + (
        ", on each of the GPUs." if model.gpus else "."
    )
    gpus = f"  gpus: {list(model.gpus)}" if model.gpus else ""
    yield f"instance_group [ {{ kind: {model.kind}  count: {model.instances}{gpus} }} ]"
    for name, text in {"model": model.model, **model.parameters}.items():
        yield ""
        yield from textwrap.wrap(
            PARAMETERS[name].metadata["description"], 110, initial_indent="# ", subsequent_indent="# "
        )
        yield f'parameters {{ key: "{name}"  value {{ string_value: {_quoted(text)} }} }}'


def _wait(model: ServedModel) -> str:
    return f"{model.request_batch_max_wait_ms:g}"


def _microseconds(model: ServedModel) -> int:
    return round(model.request_batch_max_wait_ms * 1000)


def _quoted(text: str) -> str:
    if '"' in text and not re.search(r"['\\\x00-\x1f]", text):  # JSON reads better without backslashes
        return f"'{text}'"
    return f'"{text_encoding.CEscape(text, as_utf8=True)}"'


def _import_path(model: ServedModel) -> str:
    if not model.import_directory:
        return ""
    where = f"# Where {model.parameters['pipeline_class']} is."
    return f"import sys\n\n{where}\nsys.path.insert(0, {model.import_directory!r})\n\n"


def _check(config: str) -> None:
    """Read the file as Triton and the engine will."""
    try:
        message = text_format.Parse(config, model_config_pb2.ModelConfig())
    except (text_format.ParseError, ValueError) as error:
        raise ConfigurationError(f"{error}: what was given makes no config.pbtxt:\n{config}") from None
    EngineConfig.from_model_config(json_format.MessageToDict(message, preserving_proto_field_name=True), Path("/"))
