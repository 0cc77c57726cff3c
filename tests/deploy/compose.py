"""Compose files as `docker compose` reads them: merged, with their variables filled in."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
GPU = ("docker-compose.yml",)
CPU = ("docker-compose.yml", "docker-compose.cpu.yml")
REPOSITORY = ("docker-compose.yml", "docker-compose.repository.yml")

_VARIABLE = re.compile(r"\$\{(?P<name>\w+):-(?P<default>[^}]*)\}")
_RESET = object()


class _Loader(yaml.SafeLoader):
    """Knows compose's `!reset`, which takes away what an earlier file says."""


def _reset(*_: object) -> object:
    return _RESET


_Loader.add_constructor("!reset", _reset)


def read(files: tuple[str, ...], environment: Mapping[str, str] | None = None) -> dict[str, Any]:
    """The merged files; variables come from `environment`, or are their defaults."""
    merged: Any = {}
    for name in files:
        text = _VARIABLE.sub(
            lambda found: (environment or {}).get(found["name"]) or found["default"], (ROOT / name).read_text()
        )
        assert "${" not in text, f"{name}: a variable without a default"
        merged = _merged(merged, yaml.load(text, _Loader))
    return dict(merged)


def variables() -> dict[str, set[str]]:
    """The variables of all files, each with its defaults."""
    found: dict[str, set[str]] = {}
    for name in {*CPU, *REPOSITORY}:
        for match in _VARIABLE.finditer((ROOT / name).read_text()):
            found.setdefault(match["name"], set()).add(match["default"])
    return found


def words(command: str | list[str]) -> list[str]:
    """A command as compose splits it."""
    return shlex.split(command) if isinstance(command, str) else command


def seconds(duration: str) -> int:
    """`1m30s` as 90."""
    units = {"h": 3600, "m": 60, "s": 1}
    return sum(int(number) * units[unit] for number, unit in re.findall(r"(\d+)([hms])", duration))


def _merged(earlier: Any, later: Any) -> Any:
    if not (isinstance(earlier, dict) and isinstance(later, dict)):
        return later
    both = {**earlier, **{key: _merged(earlier.get(key), value) for key, value in later.items()}}
    return {key: value for key, value in both.items() if value is not _RESET}
