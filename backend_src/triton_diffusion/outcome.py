"""How a request ended, in the few words that metrics and traces can count by."""

from __future__ import annotations

import re

from triton_diffusion.errors import DeadlineExceededError, TritonDiffusionError

OUTCOMES = {
    "completed": "was answered with pictures",
    "failed": "failed in the pipeline, or by a fault of ours",
    "cancelled": "was cancelled by its client, or its client was gone",
    "expired": "had a timeout of its own, which passed",
    "refused": "has to be changed, or sent again later: bad input, too many waiting, the model being unloaded",
}
"""Every outcome, and what it means."""

_BY_CODE = {"CANCELLED": "cancelled", "INVALID_ARG": "refused", "NOT_FOUND": "refused", "UNAVAILABLE": "refused"}


def outcome_of(error: TritonDiffusionError | None) -> str:
    """The outcome of a request that was answered with `error`; None stands for pictures."""
    if error is None:
        return "completed"
    if isinstance(error, DeadlineExceededError):
        return "expired"
    return _BY_CODE.get(error.code, "failed")


def reason_of(error: TritonDiffusionError | None) -> str:
    """The name of the error's class in snake_case; empty for pictures."""
    return "" if error is None else re.sub(r"(?<!^)(?=[A-Z])", "_", type(error).__name__).lower()
