"""The errors that a client or an operator can meet.

TritonDiffusionError
├── ConfigurationError       config.pbtxt asks for something that cannot be served   INVALID_ARG
├── InvalidRequestError      the request has to change before it is sent again       INVALID_ARG
│   ├── UnknownFieldError      a name that no field has
│   ├── FieldTypeError         a value of the wrong type
│   └── FieldValueError        a value out of bounds, or not for this pipeline
├── QueueFullError           more requests wait than max_queue_size                  UNAVAILABLE
├── EngineStoppedError       the model is being unloaded                             UNAVAILABLE
├── DeadlineExceededError    the request's own timeout passed                        UNAVAILABLE
├── RequestCancelledError    the client cancelled, or is gone                        CANCELLED
└── ExecutionError           the pipeline failed on this request                     INTERNAL
    ├── CollateError           tensors that cannot be stacked
    ├── NonFiniteError         the latents hold NaN or infinity
    └── PipelineOutputError    a pipeline's forward returned something else than its contract says

Each class carries the name of its Triton error code. The Triton side translates it in one place.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import ClassVar


class TritonDiffusionError(Exception):
    """Base of all errors of this package."""

    code: ClassVar[str] = "INTERNAL"


class ConfigurationError(TritonDiffusionError):
    """The model cannot be served as config.pbtxt asks."""

    code = "INVALID_ARG"


class InvalidRequestError(TritonDiffusionError):
    """The request has to change before it is sent again."""

    code = "INVALID_ARG"


class UnknownFieldError(InvalidRequestError):
    """A name that no field has."""


class FieldTypeError(InvalidRequestError):
    """A value of the wrong type."""


class FieldValueError(InvalidRequestError):
    """A value out of bounds, or not for this pipeline."""


class QueueFullError(TritonDiffusionError):
    """More requests wait than max_queue_size allows."""

    code = "UNAVAILABLE"


class EngineStoppedError(TritonDiffusionError):
    """The model is being unloaded."""

    code = "UNAVAILABLE"


class DeadlineExceededError(TritonDiffusionError):
    """The timeout that the request itself set has passed."""

    code = "UNAVAILABLE"


class RequestCancelledError(TritonDiffusionError):
    """The client cancelled the request, or is gone."""

    code = "CANCELLED"


class ExecutionError(TritonDiffusionError):
    """The pipeline failed on this request."""


class CollateError(ExecutionError):
    """Per-request tensors that cannot be stacked into one."""


class NonFiniteError(ExecutionError):
    """The latents of a request hold NaN or infinity."""


class PipelineOutputError(ExecutionError):
    """A pipeline's forward returned something else than its contract says."""


def as_error(error: Exception) -> TritonDiffusionError:
    """`error` as one of ours, without the traceback and file paths that a client has no use for."""
    if isinstance(error, TritonDiffusionError):
        return error
    wrapped = ExecutionError(f"{type(error).__name__}: {error}")
    wrapped.__cause__ = error
    return wrapped


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """`, did you mean 'height'?` where a known name is near, else the list of all."""
    names = sorted(known)
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.65)
    return f", did you mean {near[0]!r}?" if near else f"; known are: {', '.join(names)}"
