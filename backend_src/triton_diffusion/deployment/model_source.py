"""What may be served: a checkpoint's directory, a hub id, or a Triton model repository."""

from __future__ import annotations

import re
from pathlib import Path

from triton_diffusion.errors import ConfigurationError
from triton_diffusion.paths import path_from

INDEX = "model_index.json"
"""What diffusers' save_pretrained writes into the directory of a checkpoint."""

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


def find_model(model: str, directory: Path) -> str:
    """The absolute path of a checkpoint's directory, or the hub id.

    Args:
        directory: what a relative path is relative to.

    Raises:
        ConfigurationError: it is neither; the message says what was looked for.
    """
    path = path_from(directory, model).absolute()
    if (path / INDEX).is_file():
        return str(path)
    if path.is_dir():
        raise ConfigurationError(
            f"{model}: the directory holds no {INDEX}, which a checkpoint saved by save_pretrained has"
            + (", but a config.pbtxt: give the folder above it" if (path / "config.pbtxt").is_file() else "")
            + (
                f"; {path.name} is a Triton model repository, and its models are served as they are"
                if is_repository(path)
                else ", and no */config.pbtxt, which a Triton model repository has"
            )
        )
    if path.is_file():
        raise ConfigurationError(f"{model}: is a file; give the directory that save_pretrained wrote, or a hub id")
    if _HUB_ID.fullmatch(model) is None:
        raise ConfigurationError(
            f"{model}: there is no such directory, and it is no hub id (ORGANISATION/NAME); give a directory with a "
            f"{INDEX}, a hub id, or a Triton model repository"
        )
    return model


def is_repository(path: Path) -> bool:
    """Whether the directory holds models as Triton wants them."""
    return any(path.glob("*/config.pbtxt"))


def default_name(model: str) -> str:
    """A Triton model name made of the last part of a path or hub id."""
    name = re.sub(r"[^A-Za-z0-9._-]+", "_", Path(model).name)
    return name.lstrip("._-") or "model"
