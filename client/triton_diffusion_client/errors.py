"""What can go wrong for one request, seen from the client.

DiffusionClientError
├── InvalidRequestError       the request has to change; the message names field, value and remedy
├── ServerUnavailableError    nobody there, shutting down, too many waiting, or too late: try again later
├── RequestCancelledError     cancelled by this client
└── ServerError               the server failed on this request
"""

from __future__ import annotations

import asyncio

import aiohttp
from tritonclient.utils import InferenceServerException

import triton_diffusion.errors


class DiffusionClientError(Exception):
    """Base of the client's errors; the message is the server's own where it sent one."""


class InvalidRequestError(DiffusionClientError):
    """The request has to change before it is sent again."""


class ServerUnavailableError(DiffusionClientError):
    """The server cannot be reached, is shutting down, has too many requests waiting, or was too slow."""


class RequestCancelledError(DiffusionClientError):
    """The request was cancelled."""


class ServerError(DiffusionClientError):
    """The server failed on this request."""


_BY_STATUS: dict[str, type[DiffusionClientError]] = {
    "StatusCode.INVALID_ARGUMENT": InvalidRequestError,
    "StatusCode.NOT_FOUND": InvalidRequestError,
    "StatusCode.UNAVAILABLE": ServerUnavailableError,
    "StatusCode.DEADLINE_EXCEEDED": ServerUnavailableError,
    "StatusCode.CANCELLED": RequestCancelledError,
    "400": InvalidRequestError,
    "404": InvalidRequestError,
    "503": ServerUnavailableError,
}


def as_client_error(error: BaseException) -> DiffusionClientError:
    """An error of tritonclient, aiohttp or asyncio as one of ours."""
    if isinstance(error, DiffusionClientError):
        return error
    if isinstance(error, triton_diffusion.errors.InvalidRequestError):
        converted: DiffusionClientError = InvalidRequestError(str(error))
    elif isinstance(error, InferenceServerException):
        converted = _BY_STATUS.get(str(error.status()), ServerError)(error.message() or str(error))
    elif isinstance(error, asyncio.TimeoutError):
        converted = ServerUnavailableError("no answer within the timeout")
    elif isinstance(error, (aiohttp.ClientError, OSError)):
        converted = ServerUnavailableError(f"the server cannot be reached: {error}")
    else:
        converted = ServerError(f"{type(error).__name__}: {error}")
    converted.__cause__ = error
    return converted
