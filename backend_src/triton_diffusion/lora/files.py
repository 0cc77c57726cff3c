"""The LoRA adapters of a served model, as its configuration lists them: names, and the files that hold them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from triton_diffusion.errors import ConfigurationError
from triton_diffusion.paths import is_written_as_path, path_from

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
"""What an adapter may be called: no path, and nothing that separates names in a request."""

PICKLES = (".bin", ".ckpt", ".pickle", ".pkl", ".pt", ".pth")
"""Files that run code when they are read."""

DEFAULT_FILE = "pytorch_lora_weights.safetensors"
"""What diffusers' `save_lora_weights` writes."""

HIGH_NOISE, LOW_NOISE = "high_noise", "low_noise"
"""Wan 2.2 has two transformers; these are in the names of the files of an adapter for the first and the second one."""


@dataclass(frozen=True)
class LoraFiles:
    """One adapter, and where it is.

    Args:
        source: a directory, or a hub id.
        weights: the safetensors files in it; none lets diffusers find the one of a hub repository.
    """

    name: str
    source: str
    weights: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.name!r} ({', '.join(f'{self.source}/{file}' for file in self.weights) or self.source})"


def find_loras(lora_directory: str, loras: Mapping[str, str], base: Path) -> list[LoraFiles]:
    """The adapters in a directory, and those that are listed by name; sorted by name.

    Args:
        lora_directory: holds a folder or a .safetensors file for each adapter, which gives it its name; may be empty.
        loras: a directory, a .safetensors file or a hub id for each name.
        base: what relative paths are relative to.

    Raises:
        ConfigurationError: there is no such directory or file, a name cannot be one, or an adapter is a pickle.
    """
    found = _in_directory(path_from(base, lora_directory)) if lora_directory else []
    found += [_listed(name, source, base) for name, source in loras.items()]
    names = [adapter.name for adapter in found]
    for name in names:
        if not NAME.fullmatch(name):
            raise ConfigurationError(f"lora {name!r}: a name is made of letters, digits and . _ -: rename it")
        if names.count(name) > 1:
            raise ConfigurationError(f"lora {name!r}: there are two of that name; rename one")
    return sorted(found, key=lambda adapter: adapter.name)


def _in_directory(directory: Path) -> list[LoraFiles]:
    if not directory.is_dir():
        raise ConfigurationError(f"config.pbtxt: parameter lora_directory: {directory} is not a directory")
    # Anything else, as a README, is no adapter.
    adapters = [
        path
        for path in sorted(directory.iterdir())
        if not path.name.startswith(".") and (path.is_dir() or path.suffix.lower() in (".safetensors", *PICKLES))
    ]
    return [_at_path(path.name.removesuffix(".safetensors"), path) for path in adapters]


def _listed(name: str, source: str, base: Path) -> LoraFiles:
    path = path_from(base, source)
    if path.exists():
        return _at_path(name, path)
    if is_written_as_path(source) or Path(source).suffix.lower() in (".safetensors", *PICKLES):
        raise ConfigurationError(f"config.pbtxt: parameter loras: {name!r}: there is no {path}")
    return LoraFiles(name, source, ())


def _at_path(name: str, path: Path) -> LoraFiles:
    if path.is_file():
        _refuse_pickle(name, path)
        if path.suffix != ".safetensors":
            raise ConfigurationError(f"lora {name!r}: {path} is not a .safetensors file")
        return LoraFiles(name, str(path.parent.resolve()), (path.name,))
    files = sorted(file.name for file in path.glob("*.safetensors"))
    if not files:
        for file in sorted(path.iterdir()):
            _refuse_pickle(name, file)
        raise ConfigurationError(f"lora {name!r}: there is no .safetensors file in {path}")
    if len(files) == 2 and HIGH_NOISE in files[0] and LOW_NOISE in files[1]:
        return LoraFiles(name, str(path.resolve()), tuple(files))
    if DEFAULT_FILE not in files and len(files) > 1:
        raise ConfigurationError(
            f"lora {name!r}: {path} holds {', '.join(files)}: keep one of them, name it {DEFAULT_FILE}, or give each "
            "a name of its own in the parameter loras"
        )
    return LoraFiles(name, str(path.resolve()), (DEFAULT_FILE if DEFAULT_FILE in files else files[0],))


def _refuse_pickle(name: str, path: Path) -> None:
    if path.suffix.lower() in PICKLES:
        raise ConfigurationError(f"lora {name!r}: {path} is a pickle, which may run code: convert it to .safetensors")
