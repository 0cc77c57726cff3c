"""One request: one prompt, one id."""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from triton_diffusion.errors import (
    DeadlineExceededError,
    FieldTypeError,
    FieldValueError,
    InvalidRequestError,
    RequestCancelledError,
    UnknownFieldError,
    did_you_mean,
)
from triton_diffusion.field import Field, field, fields_of
from triton_diffusion.sampling_params import SAMPLING_FIELDS, SamplingParams
from triton_diffusion.timeline import Timeline

_request_numbers = itertools.count(1)


def _never() -> bool:
    return False


@dataclasses.dataclass(kw_only=True, eq=False)
class OmniDiffusionRequest:
    """One prompt, with all that is needed to make its images.

    Args:
        request_id: unique in this process; `unique_request_id` makes one from a client's own id.
        sampling_params: fully resolved when it comes from `parse_request`.
        arrival_time: `time.monotonic()` when the request reached the engine.
        deadline: `time.monotonic()` after which nobody waits for the answer.
        is_cancelled: asked between denoising steps.
        kv_sender_info: carried for code that was written for vLLM-Omni; unused here.
        timeline: when its stages were; those who run it note it.

    Raises:
        FieldTypeError: the prompt is not a single string.
    """

    prompt: str = field("What to draw.", required=True, minimum=1, maximum=10_000, argument="prompt")
    negative_prompt: str | None = field("What to keep out of the picture.", maximum=10_000, argument="negative_prompt")
    image: np.ndarray[Any, Any] | None = field(
        "The input image of an image-conditioned pipeline, RGB [height, width, 3].", argument="image"
    )
    priority: int | None = field(
        "Order among the waiting requests: the smaller goes first. Default: 0.", minimum=-100, maximum=100
    )
    request_id: str
    sampling_params: SamplingParams = SamplingParams()
    arrival_time: float = dataclasses.field(default_factory=time.monotonic)
    deadline: float | None = None
    is_cancelled: Callable[[], bool] = _never
    kv_sender_info: dict[str, Any] | None = None
    timeline: Timeline = dataclasses.field(default_factory=Timeline)

    def __post_init__(self) -> None:
        if not isinstance(self.prompt, str):
            raise FieldTypeError(f"prompt is of type {type(self.prompt).__name__}: a request has exactly one string")

    def raise_if_stopped(self) -> None:
        """
        Raises:
            RequestCancelledError: the client cancelled, or is gone.
            DeadlineExceededError: the request's own timeout has passed.
        """
        if self.is_cancelled():
            raise RequestCancelledError("the request was cancelled by its client")
        if self.deadline is not None and time.monotonic() > self.deadline:
            seconds = self.deadline - self.arrival_time
            raise DeadlineExceededError(f"the request's timeout of {seconds:.3f} s has passed")


PROMPT_FIELDS: dict[str, Field] = {declared.name: declared for declared in fields_of(OmniDiffusionRequest)}
"""The fields of a request beside its sampling parameters, by name."""

FIELDS: dict[str, Field] = {**PROMPT_FIELDS, **SAMPLING_FIELDS}
"""Every field of a request: Triton's inputs, the request parameters, the validation and the docs come from it."""

BATCH_KEY = "batch_key"
"""The input whose shape carries the hash of the key (see `SamplingParamsKey.batch_key_shape`)."""


def unique_request_id(client_id: str = "") -> str:
    """An id that no other request of this process has; it begins with the client's own id where there is one."""
    return f"{client_id or 'request'}-{next(_request_numbers)}"


def parse_request(
    tensors: Mapping[str, np.ndarray[Any, Any]],
    parameters: Mapping[str, object],
    *,
    request_id: str,
    pipeline: str,
    taken: frozenset[str],
    defaults: SamplingParams,
    random_seed: Callable[[], int],
    timeout: float | None = None,
    is_cancelled: Callable[[], bool] = _never,
) -> OmniDiffusionRequest:
    """A request from Triton's input tensors and request parameters.

    A tensor counts before a parameter of the same name, and that before the model's default.

    Args:
        tensors: Triton's inputs by name, each of one element (an image: [1, H, W, 3]).
        parameters: the request parameters by name.
        pipeline, taken: the name of the pipeline class, and of the fields that it takes.
        defaults: the model's sampling parameters.
        random_seed: makes the seed of a request that gives none.
        timeout: seconds from now.

    Raises:
        InvalidRequestError: naming the field, the value, what is allowed and the nearest right name.
    """
    given = {**parameters, **tensors}
    for name in given:
        if name not in FIELDS:
            raise UnknownFieldError(f"unknown field {name!r}{did_you_mean(name, taken)}")
        if name not in taken:
            raise FieldValueError(f"{name} is not taken by {pipeline}; it takes: {', '.join(sorted(taken))}")
    values = {name: FIELDS[name].parse(value) for name, value in given.items()}
    if "prompt" not in values:
        raise InvalidRequestError("prompt is missing: every request needs exactly one prompt")
    prompt_values = {name: values.pop(name) for name in PROMPT_FIELDS if name in values}
    sampling_params = SamplingParams(**values).with_defaults(defaults)
    if sampling_params.seed is None:
        sampling_params = dataclasses.replace(sampling_params, seed=random_seed())
    arrival_time = time.monotonic()
    return OmniDiffusionRequest(
        **prompt_values,
        request_id=request_id,
        sampling_params=sampling_params,
        arrival_time=arrival_time,
        deadline=None if timeout is None else arrival_time + timeout,
        is_cancelled=is_cancelled,
    )
