"""The outcome of a request, by what it was answered with."""

from __future__ import annotations

import pytest

from triton_diffusion import errors
from triton_diffusion.errors import TritonDiffusionError
from triton_diffusion.outcome import OUTCOMES, outcome_of, reason_of


@pytest.mark.parametrize(
    ("error", "outcome", "reason"),
    [
        (None, "completed", ""),
        (errors.FieldValueError(), "refused", "field_value_error"),
        (errors.QueueFullError(), "refused", "queue_full_error"),
        (errors.EngineStoppedError(), "refused", "engine_stopped_error"),
        (errors.DeadlineExceededError(), "expired", "deadline_exceeded_error"),
        (errors.RequestCancelledError(), "cancelled", "request_cancelled_error"),
        (errors.NonFiniteError(), "failed", "non_finite_error"),
        (errors.as_error(KeyError("x")), "failed", "execution_error"),
    ],
)
def test_outcome_and_reason(error: TritonDiffusionError | None, outcome: str, reason: str) -> None:
    assert (outcome_of(error), reason_of(error)) == (outcome, reason)


def test_every_error_has_a_documented_outcome() -> None:
    classes = [TritonDiffusionError]
    for parent in classes:
        classes += parent.__subclasses__()
    assert {outcome_of(one()) for one in classes} | {"completed"} == set(OUTCOMES)
