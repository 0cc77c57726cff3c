"""Options of the command line, one for each option of a served model."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Annotated, Any

import typer

from triton_diffusion.deployment.model_options import MODEL_OPTIONS, ModelOption


def with_model_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a typer command an option for each model option; its argument `given` gets those that were given."""

    def wrapper(**arguments: Any) -> None:
        values = {name: arguments.pop(name) for name in MODEL_OPTIONS}
        command(**arguments, given={name: value for name, value in values.items() if value is not None})

    signature = inspect.signature(command, eval_str=True)
    own = [item for item in signature.parameters.values() if item.name != "given"]
    parameters = [item.replace(kind=inspect.Parameter.KEYWORD_ONLY) for item in own]
    parameters += [_parameter(option) for option in MODEL_OPTIONS.values()]
    wrapper.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    wrapper.__annotations__ = {item.name: item.annotation for item in parameters}
    wrapper.__name__, wrapper.__doc__ = command.__name__, command.__doc__
    return wrapper


def _parameter(option: ModelOption) -> inspect.Parameter:
    flag = f"{option.flag}/--no-{option.flag[2:]}" if option.is_switch else option.flag
    declared = typer.Option(
        flag,
        help=option.description,
        rich_help_panel="Model options (also in a deploy file)",
        show_default=False,
        metavar=None if option.is_switch else option.name.rpartition("_")[2].upper(),
    )
    annotation: Any = Annotated[(bool if option.is_switch else str) | None, declared]
    return inspect.Parameter(option.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
