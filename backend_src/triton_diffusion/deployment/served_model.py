"""One model as it is to be served."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from triton_diffusion.config import PARAMETERS
from triton_diffusion.deployment.model_options import MODEL_OPTIONS, Given
from triton_diffusion.deployment.model_source import default_name, find_model
from triton_diffusion.errors import ConfigurationError
from triton_diffusion.paths import is_written_as_path, path_from

IMPORT_DIRECTORY = "import_directory"
"""What `with_absolute_paths` adds to the options: nobody gives it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServedModel:
    """One model of the repository.

    Args:
        name: Triton's name of it.
        model: absolute path of the checkpoint's directory, or hub id.
        max_num_seqs: the most requests of one wave.
        request_batch_max_wait_ms: how long the first of them waits for company.
        instances: engines; on each of `gpus`, where these are given.
        parameters: what else config.pbtxt says, by name.
        import_directory: the folder that holds the module of `pipeline_class`, unless it is installed.
    """

    name: str
    model: str
    max_num_seqs: int
    request_batch_max_wait_ms: float
    instances: int
    gpus: tuple[int, ...]
    parameters: Mapping[str, str]
    import_directory: str = ""

    @classmethod
    def from_options(cls, given: Given) -> ServedModel:
        """
        Args:
            given: checked options, with absolute paths.

        Raises:
            ConfigurationError: options that contradict each other.
        """
        values: dict[str, Any] = {
            name: MODEL_OPTIONS[name].parse(given[name]) if name in given else MODEL_OPTIONS[name].default
            for name in ("max_num_seqs", "request_batch_max_wait_ms", "instances", "gpus")
        }
        device = given.get("device", "auto")
        if values["gpus"] and device != "auto":
            raise ConfigurationError(
                f"gpus={given['gpus']} and device={device}: gpus puts an engine on each of its GPUs; leave out one of "
                "the two"
            )
        return cls(
            name=given.get("name") or default_name(given["model"]),
            model=given["model"],
            parameters={name: text for name, text in given.items() if name in PARAMETERS and name != "model"},
            import_directory=given.get(IMPORT_DIRECTORY, ""),
            **values,
        )

    @property
    def kind(self) -> str:
        """The kind of its Triton instances."""
        if self.gpus:
            return "KIND_GPU"
        return "KIND_CPU" if self.parameters.get("device") == "cpu" else "KIND_MODEL"


def with_absolute_paths(given: Given, directory: Path) -> dict[str, str]:
    """The options with paths that mean the same from anywhere.

    Args:
        directory: what a relative path is relative to.

    Raises:
        ConfigurationError: the model is not there.
    """
    absolute = dict(given)
    if "model" in given:
        absolute["model"] = find_model(given["model"], directory)
    if given.get("lora_directory"):
        absolute["lora_directory"] = _existing(given["lora_directory"], directory, "lora_directory")
    if "loras" in given:
        loras = {name: _lora(value, directory) for name, value in json.loads(given["loras"]).items()}
        absolute["loras"] = json.dumps(loras)
    module = given.get("pipeline_class", "").partition(":")[0].partition(".")[0]
    if module and ((directory / f"{module}.py").is_file() or (directory / module).is_dir()):
        absolute[IMPORT_DIRECTORY] = str(directory.absolute())
    return absolute


def _lora(value: str, directory: Path) -> str:
    """The absolute path of an adapter, or its hub id."""
    is_path = is_written_as_path(value) or (directory / value).exists()
    return _existing(value, directory, "loras") if is_path else value


def _existing(text: str, directory: Path, name: str) -> str:
    path = path_from(directory, text).absolute()
    if not path.exists():
        raise ConfigurationError(f"{name}={text}: there is no {path}")
    return str(path)
