"""Which models are served, from the command line and the deploy file: the command line wins."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from triton_diffusion.deployment.deploy_file import DeployFile, read_deploy_file
from triton_diffusion.deployment.model_options import (
    CAPACITY,
    DEPRECATED_CAPACITY,
    MODEL_OPTIONS,
    Given,
    Warn,
    checked,
    nobody,
)
from triton_diffusion.deployment.model_source import default_name
from triton_diffusion.deployment.served_model import ServedModel, with_absolute_paths
from triton_diffusion.errors import ConfigurationError


def plan_models(
    model: str | None,
    named_models: Sequence[str],
    deploy_file: Path | None,
    given: Mapping[str, object],
    warn: Warn,
) -> list[ServedModel]:
    """The models to serve.

    Args:
        model: the one model of the command line, a directory or hub id.
        named_models: `name=model` each, or a model alone, for several of them.
        given: the model options of the command line, which count for every model.

    Raises:
        ConfigurationError: no model, two of one name, or options that are wrong or contradict each other. The command
            line wins over the deploy file, but the capacity under both of its names is one value everywhere.
    """
    if model is not None and named_models:
        raise ConfigurationError(f"MODEL {model} and --model {named_models[0]}: give MODEL, or --model for each")
    options = with_absolute_paths(checked(given, _flag, warn), Path.cwd())
    file = read_deploy_file(deploy_file, warn) if deploy_file is not None else DeployFile([], names_models=True)
    entries = file.models
    for entry in entries:
        _check_capacity(entry, options, deploy_file)
    if model is not None:
        if len(entries) > 1:
            raise ConfigurationError(
                f"MODEL {model}: {deploy_file} holds {len(entries)} models; give --model NAME={model} to say which"
            )
        entries = [{**(entries[0] if entries else {}), **_located({"model": model})}]
    shared: dict[str, str] = {}
    if named_models and len(entries) == 1 and "model" not in entries[0]:
        shared = entries.pop()  # the options of each model, as those of the command line are
    names = [_name_of(entry) for entry in entries]
    for text in named_models:
        entry = {**shared, **_named(text)}
        if entry["name"] not in names and not file.names_models and not shared and entries:
            raise ConfigurationError(
                f"--model {text}: {deploy_file} holds {names[0]} already, and its options are for that alone; write "
                "both below models: in the file, or leave one out"
            )
        if entry["name"] in names:
            place = names.index(entry["name"])
            entries[place] = {**entries[place], **entry}
        else:
            entries.append(entry)
    if not entries:
        raise ConfigurationError("no model to serve: give a directory with a model_index.json, or a hub id")
    if "name" in options and len(entries) > 1:
        raise ConfigurationError(f"--name {options['name']}: there are {len(entries)} models; give --model NAME=MODEL")
    for entry in entries:
        if "model" not in entry:
            raise ConfigurationError(f"{deploy_file}: has no model; add one, or give MODEL on the command line")
    models = [ServedModel.from_options({**entry, **options}) for entry in entries]
    names = [model.name for model in models]
    for name in names:
        if [other.casefold() for other in names].count(name.casefold()) > 1:  # one folder, on some disks
            raise ConfigurationError(f"two models are called {name}; give each a name of its own: --model NAME=MODEL")
    return models


def _flag(name: str) -> str:
    return MODEL_OPTIONS[name].flag


def _check_capacity(entry: Given, options: Given, deploy_file: Path | None) -> None:
    """Refuses two names of the capacity with two values; under one name, the command line wins."""
    names = [DEPRECATED_CAPACITY if DEPRECATED_CAPACITY in given else CAPACITY for given in (entry, options)]
    values = [given.get(CAPACITY) for given in (entry, options)]
    if None not in values and names[0] != names[1] and int(str(values[0])) != int(str(values[1])):
        raise ConfigurationError(
            f"{deploy_file}: {names[0]}={values[0]} and {_flag(names[1])}={values[1]} differ, and mean the same; "
            f"{DEPRECATED_CAPACITY} is deprecated: write {CAPACITY}"
        )


def _located(entry: dict[str, str]) -> dict[str, str]:
    return with_absolute_paths(entry, Path.cwd())


def _named(text: str) -> dict[str, str]:
    """`name=model`, or a model alone, whose path may hold the sign too."""
    name, sign, model = text.partition("=")
    if not sign or Path(text).is_dir():
        entry = _located({"model": text})
        return {"name": default_name(entry["model"]), **entry}
    return _located(checked({"name": name, "model": model}, lambda option: f"--model {text}: {option}", nobody))


def _name_of(entry: Mapping[str, str]) -> str:
    return entry.get("name") or default_name(entry.get("model", ""))
