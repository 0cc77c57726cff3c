"""The options of one served model: command line, deploy file and config.pbtxt all come from this table."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from triton_diffusion.config import LARGEST, PARAMETERS, positive
from triton_diffusion.errors import ConfigurationError, did_you_mean

Warn = Callable[[str], None]
"""Told, in a sentence, what is not wrong and yet should be changed."""


def nobody(text: str) -> None:
    """Is told, and tells nobody."""


CAPACITY, DEPRECATED_CAPACITY = "max_num_seqs", "diffusion_batch_size"

Given = Mapping[str, str]
"""Options that somebody gave, by name, each as the text that config.pbtxt would hold."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelOption:
    """One option of a served model.

    Args:
        name: the key of a deploy file; with dashes, the option of the command line.
        parse: the value of a text; a ValueError says what is allowed.
        default: a boolean makes it a switch of the command line.
    """

    name: str
    description: str
    parse: Callable[[str], Any]
    default: Any

    @property
    def flag(self) -> str:
        return f"--{self.name.replace('_', '-')}"

    @property
    def is_switch(self) -> bool:
        return isinstance(self.default, bool)


LONGEST_WAIT_MS = 24 * 60 * 60 * 1000


def _milliseconds(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 <= number <= LONGEST_WAIT_MS:
        raise ValueError(f"must be a number of milliseconds from 0 to {LONGEST_WAIT_MS}, a day")
    return number


def _gpus(text: str) -> tuple[int, ...]:
    if re.fullmatch(r"\d+(,\s*\d+)*", text) is None:
        raise ValueError("must be numbers of GPUs with commas between them, like 0,1")
    gpus = tuple(int(number) for number in text.split(","))
    if max(gpus) > LARGEST:
        raise ValueError(f"must be numbers of GPUs, at most {LARGEST}")
    if len(set(gpus)) < len(gpus):
        raise ValueError("names a GPU twice; give each once, and --instances for several engines on each")
    return gpus


def _name(text: str) -> str:
    if re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", text) is None:
        raise ValueError("must be letters, digits, dots, dashes and underscores, and begin with a letter or digit")
    return text


def _model(text: str) -> str:
    if not text:
        raise ValueError("must be a directory or a hub id")
    return text


_OWN = (
    ModelOption(
        name="name",
        description="Name of the served model. Default: the last part of its directory or hub id.",
        parse=_name,
        default="",
    ),
    ModelOption(
        name="max_num_seqs",
        description="The most requests of one wave; Triton's max_batch_size.",
        parse=positive,
        default=1,
    ),
    ModelOption(
        name="diffusion_batch_size",
        description="Deprecated name of max_num_seqs.",
        parse=positive,
        default=None,
    ),
    ModelOption(
        name="request_batch_max_wait_ms",
        description="How long the first request of a wave waits for company, in milliseconds.",
        parse=_milliseconds,
        default=0.0,
    ),
    ModelOption(
        name="instances",
        description="Engines, each with its own copy of the pipeline; with gpus, on each GPU.",
        parse=positive,
        default=1,
    ),
    ModelOption(
        name="gpus",
        description="GPUs to put an engine on: 0,1. Default: as device says.",
        parse=_gpus,
        default=(),
    ),
)

MODEL = ModelOption(name="model", description=PARAMETERS["model"].metadata["description"], parse=_model, default="")

MODEL_OPTIONS: dict[str, ModelOption] = {option.name: option for option in _OWN} | {
    name: ModelOption(
        name=name,
        description=attribute.metadata["description"],
        parse=attribute.metadata["parse"],
        default=attribute.default,
    )
    for name, attribute in PARAMETERS.items()
    if name != "model"
}
"""Every option by name, but the model itself."""


def checked(given: Mapping[str, object], label: Callable[[str], str], warn: Warn) -> dict[str, str]:
    """The options as texts, each of which parses; `max_num_seqs` whichever of its two names was given.

    The deprecated name stays beside it, for whoever compares it with another source.

    Args:
        given: plain values, or texts.
        label: an option's name as whoever gave it wrote it.

    Raises:
        ConfigurationError: naming the option, the value, what is allowed and the nearest right name.
    """
    options = {MODEL.name: MODEL, **MODEL_OPTIONS}
    texts = {}
    for name, value in given.items():
        if name not in options:
            raise ConfigurationError(f"{label(name)}: unknown option{did_you_mean(name, options)}")
        try:
            texts[name] = as_text(name, value)
        except TypeError as error:  # a date of YAML, say
            raise ConfigurationError(f"{label(name)}={value}: {error}; write it in quotes") from None
        try:
            if value is None:
                raise ValueError("has no value; give one or leave the option out")
            options[name].parse(texts[name])
        except ValueError as error:
            raise ConfigurationError(f"{label(name)}={texts[name]}: {error}") from None
    return _without_deprecated_name(texts, label, warn)


def as_text(name: str, value: object) -> str:
    """A plain value (of YAML, say) of an option as config.pbtxt's parameters hold it.

    Raises:
        TypeError: it is no value of JSON.
    """
    if isinstance(value, str):
        return value
    if name == "gpus" and isinstance(value, list) and all(type(item) is int for item in value):
        return ",".join(map(str, value))
    return json.dumps(value)


def _without_deprecated_name(texts: dict[str, str], label: Callable[[str], str], warn: Warn) -> dict[str, str]:
    old, new = DEPRECATED_CAPACITY, CAPACITY
    if old not in texts:
        return texts
    value = texts[old]
    if new in texts and positive(texts[new]) != positive(value):
        raise ConfigurationError(
            f"{label(new)}={texts[new]} and {label(old)}={value} differ, and mean the same; {label(old)} is "
            "deprecated: remove it"
        )
    warn(f"{label(old)} is deprecated; its name is {label(new).rpartition(' ')[2]} now")
    return {**texts, new: value}
