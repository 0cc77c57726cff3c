"""A deploy file: YAML in vLLM-Omni's form of `stage_args`, or flat."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from triton_diffusion.deployment.model_options import MODEL, MODEL_OPTIONS, Warn, checked
from triton_diffusion.deployment.served_model import with_absolute_paths
from triton_diffusion.deployment.stage import options_of_stage
from triton_diffusion.errors import ConfigurationError, did_you_mean

NOT_HERE = {
    **dict.fromkeys(
        ("host", "http_port", "grpc_port", "metrics_port", "exit_timeout", "repository"),
        "is an option of the server; give it on the command line",
    ),
    "stages": "write stage_args: a list of stages, each with stage_type and engine_args",
}
"""Keys that somebody may look for, and where what they mean is said."""


class DeployFile(NamedTuple):
    """
    Args:
        models: the checked options of each model.
        names_models: whether it is of the form that names each model, to which others may be added.
    """

    models: list[dict[str, str]]
    names_models: bool


def read_deploy_file(path: Path, warn: Warn) -> DeployFile:
    """What the file says; paths are relative to it.

    Three forms: `stage_args`, a list of vLLM-Omni's stages; `models`, the options of each model by its name; or the
    options of one model alone.

    Raises:
        ConfigurationError: naming the file, the key, and what is allowed.
    """
    content = _load(path)
    form = next((name for name in ("stage_args", "models") if name in content), "")
    for name in content:
        if name in NOT_HERE:
            raise ConfigurationError(f"{path}: {name}: {NOT_HERE[name]}")
    if form == "stage_args":
        entries = _stages(path, content, warn)
    elif form == "models":
        entries = _models(path, content)
    else:
        entries = {"": content}
    models = []
    for place, entry in entries.items():

        def label(name: str, place: str = place) -> str:
            return f"{path}: {place}{name}"

        options = checked(entry, label, warn)
        try:
            models.append(with_absolute_paths(options, path.absolute().parent))
        except ConfigurationError as error:
            raise ConfigurationError(f"{path}: {place}{error}") from None
    return DeployFile(models, names_models=form == "models")


def _stages(path: Path, content: Mapping[str, Any], warn: Warn) -> dict[str, dict[str, Any]]:
    stages = content["stage_args"]
    if not isinstance(stages, list) or not stages or not all(isinstance(stage, dict) for stage in stages):
        raise ConfigurationError(f"{path}: stage_args: must be a list of stages")
    for name in content:
        if name == "runtime":
            warn(f"{path}: runtime: how stages are connected; there is one here, so it has no effect")
        elif name != "stage_args":
            raise ConfigurationError(f"{path}: {name}: unknown beside stage_args{did_you_mean(name, ['runtime'])}")
    entries = {}
    for number, stage in enumerate(stages):
        place = f"stage_args[{number}]."
        entries[place] = options_of_stage(stage, f"{path}: {place}", warn)
    return entries


def _models(path: Path, content: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    models = content["models"]
    if not isinstance(models, dict) or not models or not all(isinstance(entry, dict) for entry in models.values()):
        raise ConfigurationError(f"{path}: models: must be a map from a name to its options")
    for name in content:
        if name != "models":
            raise ConfigurationError(
                f"{path}: {name}: unknown beside models; the options of a model are below its name"
            )
    for name, entry in models.items():
        if entry.get("name", name) != name:
            raise ConfigurationError(
                f"{path}: models.{name}.name={entry['name']}: the name is {name} already; remove it"
            )
    return {f"models.{name}.": {**entry, "name": name} for name, entry in models.items()}


def _load(path: Path) -> dict[str, Any]:
    try:
        content = yaml.load(path.read_text(), _UniqueKeyLoader)
    except OSError as error:
        raise ConfigurationError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigurationError(f"{path}: is no text in UTF-8") from None
    except yaml.YAMLError as error:
        raise ConfigurationError(f"{path}: is not valid YAML: {error}") from None
    keys = ", ".join(["stage_args", "models", MODEL.name, *MODEL_OPTIONS])
    if not isinstance(content, dict):
        raise ConfigurationError(f"{path}: must be a map with some of these keys: {keys}")
    for name in content:
        if not isinstance(name, str):
            raise ConfigurationError(f"{path}: {name}: a key must be a string")
    return content


class _UniqueKeyLoader(yaml.SafeLoader):
    """YAML's own loader takes the last of two equal keys, without a word."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, Hashable):
                break  # which the loader itself refuses
            if key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key!r} is there twice", key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep)
