"""The error tree is what its documentation says it is."""

from __future__ import annotations

import pytest

import triton_diffusion.errors as errors

TRITON_CODES = {"UNKNOWN", "INTERNAL", "NOT_FOUND", "INVALID_ARG", "UNAVAILABLE", "UNSUPPORTED", "CANCELLED"}


def all_errors() -> list[type[errors.TritonDiffusionError]]:
    found, left = [], [errors.TritonDiffusionError]
    while left:
        found.append(left.pop())
        left += found[-1].__subclasses__()
    return found


@pytest.mark.parametrize("error", all_errors())
def test_every_error_has_a_triton_code_and_is_documented(error: type[errors.TritonDiffusionError]) -> None:
    assert error.code in TRITON_CODES
    assert errors.__doc__ is not None
    assert error.__name__ in errors.__doc__


def test_a_foreign_error_becomes_ours_without_its_traceback() -> None:
    converted = errors.as_error(KeyError("x"))
    assert isinstance(converted, errors.ExecutionError)
    assert str(converted) == "KeyError: 'x'"


def test_ours_stays_as_it_is() -> None:
    error = errors.QueueFullError("full")
    assert errors.as_error(error) is error
