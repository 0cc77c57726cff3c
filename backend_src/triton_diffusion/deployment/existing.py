"""A Triton model repository that is there already, and is served as it is."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from triton_diffusion.config import TRITONS_OWN
from triton_diffusion.deployment.model_options import MODEL_OPTIONS
from triton_diffusion.deployment.model_source import INDEX, is_repository
from triton_diffusion.deployment.served_model import ServedModel
from triton_diffusion.errors import ConfigurationError

DEFAULT_REPOSITORY = Path("model_repository")


def existing_repository(model: str | None, *, wanted_else: bool) -> Path | None:
    """The model repository that `serve MODEL` means, if it means one.

    Args:
        wanted_else: other options name what to serve, so that no MODEL does not mean the default repository.

    Raises:
        ConfigurationError: nothing is named, and there is no default repository.
    """
    if model is None:
        if wanted_else:
            return None
        if not is_repository(DEFAULT_REPOSITORY):
            raise ConfigurationError(
                "nothing to serve: give a directory saved by save_pretrained, a hub id or a Triton model repository "
                f"(./{DEFAULT_REPOSITORY}, the default, is not there)"
            )
        return DEFAULT_REPOSITORY
    path = Path(model).expanduser()
    return path if is_repository(path) and not (path / INDEX).is_file() else None


def refuse_options(existing: Path, given: Iterable[str], **others: object) -> None:
    """
    Args:
        given: names of model options.
        others: further options that are for a repository that is yet to be written, by name.

    Raises:
        ConfigurationError: there are some: the models of the repository say for themselves how they are served.
    """
    for name in given:
        field = TRITONS_OWN.get(name, f"parameter {name}")
        remedy = "rename its folder" if name == "name" else f"set {field} in its config.pbtxt"
        raise ConfigurationError(
            f"{MODEL_OPTIONS[name].flag}: {existing} is a Triton model repository, whose models are served as they "
            f"are; {remedy}"
        )
    for name, value in others.items():
        if value:
            shown = " ".join(map(str, value)) if isinstance(value, list) else value
            given_as = f"--{name}" if value is True else f"--{name} {shown}"
            raise ConfigurationError(
                f"{given_as}: {existing} is a Triton model repository, which is served as it is; leave one out"
            )


def refuse_other_models(repository: Path, models: Sequence[ServedModel]) -> None:
    """
    Raises:
        ConfigurationError: the folder holds models that are not planned, and that Triton would serve too.
    """
    planned = {model.name for model in models}
    others = sorted(path.parent.name for path in repository.glob("*/config.pbtxt") if path.parent.name not in planned)
    if others:
        raise ConfigurationError(
            f"--repository {repository}: holds {', '.join(others)} too, which would be served as well; give another "
            f"folder, or write into it by init and serve all of it: triton-diffusion serve {repository}"
        )
