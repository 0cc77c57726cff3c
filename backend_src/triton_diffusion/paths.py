"""Paths as people write them, in config.pbtxt, a deploy file or on the command line."""

from __future__ import annotations

from pathlib import Path


def path_from(directory: Path, text: str) -> Path:
    """The path that `text` means where relative ones are relative to `directory`; `~` is the home directory."""
    return directory / Path(text).expanduser()


def is_written_as_path(text: str) -> bool:
    """Whether it cannot be meant as a hub id."""
    return text.startswith((".", "/", "~"))
