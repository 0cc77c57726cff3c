"""Options of the command line, one for each option of a served model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import typer

from triton_diffusion.deployment.model_options import MODEL_OPTIONS, ModelOption
from triton_diffusion_client.command_options import with_options


def with_model_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a typer command an option for each model option; its argument `given` gets those that were given."""
    return with_options(command, "given", {name: _option(option) for name, option in MODEL_OPTIONS.items()})


def _option(option: ModelOption) -> Any:
    flag = f"{option.flag}/--no-{option.flag[2:]}" if option.is_switch else option.flag
    declared = typer.Option(
        flag,
        help=option.description,
        rich_help_panel="Model options (also in a deploy file)",
        show_default=False,
        metavar=None if option.is_switch else option.name.rpartition("_")[2].upper(),
    )
    return Annotated[(bool if option.is_switch else str) | None, declared]
