"""Options of a command that come from a table instead of its signature."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any


def with_options(command: Callable[..., None], collected: str, options: Mapping[str, Any]) -> Callable[..., None]:
    """Give a typer command further options; those that were given reach it as one dict.

    Args:
        collected: the argument of the command that gets the dict.
        options: the annotation of each option by name, as typer reads it.
    """

    def wrapper(**arguments: Any) -> None:
        values = {name: arguments.pop(name) for name in options}
        given = {name: value for name, value in values.items() if value is not None}
        command(**arguments, **{collected: given})

    signature = inspect.signature(command, eval_str=True)
    parameters = [
        item.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        for item in signature.parameters.values()
        if item.name != collected
    ]
    parameters += [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
        for name, annotation in options.items()
    ]
    wrapper.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    wrapper.__annotations__ = {item.name: item.annotation for item in parameters}
    wrapper.__name__, wrapper.__doc__ = command.__name__, command.__doc__
    return wrapper
