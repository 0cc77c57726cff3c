"""`triton-diffusion health`: whether a server really makes pictures, found out by asking it for one."""

from __future__ import annotations

import asyncio
import dataclasses
import re
import time
from typing import Annotated, Any

import numpy as np
import typer

from triton_diffusion_client.async_client import MICROSECONDS, connect
from triton_diffusion_client.errors import (
    DiffusionClientError,
    InvalidRequestError,
    ServerError,
    ServerUnavailableError,
    as_client_error,
)

Request = dict[str, Any]

SMALLEST: Request = {"num_inference_steps": 1, "height": 64, "width": 64, "num_images_per_prompt": 1}
"""The request that is tried first."""

FIRST = -100
"""Its priority: a check that waits its turn in a long queue would end a server for being popular."""

REMEDIES: tuple[tuple[str, Request], ...] = (
    ("num_inference_steps", {"num_inference_steps": 2}),
    ("height", {"height": None, "width": None}),
    ("width", {"height": None, "width": None}),
    ("image", {"image": True}),
    ("strength", {"strength": 1.0}),
    ("num_inference_steps", {"num_inference_steps": None}),
)
"""What to change when the server finds fault with a field; None leaves it to the model's default."""

UNNAMED = 4
"""So many of them are tried, too, where a pipeline fails without a word about any field."""

BUSY = re.compile(r"max_queue_size|the request's timeout of")
"""What only a living engine says: that its queue is full, or, between two steps, that a waiting request is late."""


@dataclasses.dataclass(frozen=True)
class ModelHealth:
    """What one model made of the request; `words` are for people."""

    model: str
    healthy: bool
    words: str


def health(
    url: Annotated[
        str, typer.Argument(help="Server; http:// in front uses HTTP instead of gRPC.", envvar="TRITON_DIFFUSION_URL")
    ] = "localhost:8001",
    model: Annotated[
        str | None, typer.Option(help="Check this model alone; default: every model that is ready.")
    ] = None,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds in which the server has to answer.")] = 30.0,
) -> None:
    """Ask every served model for one tiny picture, of one step; exit with 0 only if all of them answered.

    A server that is busy is healthy: its engine says between two steps that it had no time for the check.
    """
    try:
        found = asyncio.run(check(url, model, timeout))
    except DiffusionClientError as error:
        typer.echo(f"unhealthy: {error}", err=True)
        raise typer.Exit(1) from None
    for one in found:
        typer.echo(f"{'healthy' if one.healthy else 'unhealthy'}: {one.model}: {one.words}", err=not one.healthy)
    if not all(one.healthy for one in found):
        raise typer.Exit(1)


async def check(url: str, model: str | None = None, timeout: float = 30.0) -> list[ModelHealth]:
    """The health of one model, or of every ready one that generates pictures or videos.

    Raises:
        DiffusionClientError: the server does not answer, or has no such model ready; one line says which.
    """
    scheme, _, address = url.rpartition("://")
    module, connection = connect(scheme or "grpc", address, connections=16)
    try:
        async with asyncio.timeout(timeout):
            names = await _ready_models(connection, model)
        return list(await asyncio.gather(*(_check_model(module, connection, name, timeout) for name in names)))
    except Exception as error:
        problem = as_client_error(error)
        raise type(problem)(f"{url}: {_one_line(problem)}") from error
    finally:
        await connection.close()


async def _ready_models(connection: Any, wanted: str | None) -> list[str]:
    answer = await connection.get_model_repository_index()
    index = answer if isinstance(answer, list) else _as_dicts(answer.models)
    states = {entry["name"]: (entry.get("state", ""), entry.get("reason", "")) for entry in index}
    ready = sorted(name for name, (state, _) in states.items() if state == "READY")
    if wanted is None:
        ours = [name for name in ready if await _makes_pictures(connection, name)]
        if not ours:
            raise ServerUnavailableError("no model that makes pictures or videos is ready")
        return ours
    if wanted not in states:
        raise InvalidRequestError(f"there is no model {wanted!r}; ready are: {', '.join(ready) or 'none'}")
    if wanted not in ready:
        state, reason = states[wanted]
        raise ServerUnavailableError(f"model {wanted!r} is {state or 'not loaded'} {reason}".rstrip())
    return [wanted]


async def _makes_pictures(connection: Any, model: str) -> bool:
    """Whether the model is one of ours; a server may have others, which take no prompt."""
    answer = await connection.get_model_metadata(model)
    inputs = answer["inputs"] if isinstance(answer, dict) else _as_dicts(answer.inputs)
    return {"prompt", "batch_key"} <= {entry["name"] for entry in inputs}


def _as_dicts(messages: Any) -> list[dict[str, str]]:
    """Protobuf messages as HTTP's JSON has them."""
    return [{field.name: str(value) for field, value in message.ListFields()} for message in messages]


async def _check_model(module: Any, connection: Any, model: str, timeout: float) -> ModelHealth:
    began = time.monotonic()
    request = SMALLEST
    untried = list(REMEDIES)
    problem: DiffusionClientError | None = None
    try:
        async with asyncio.timeout(timeout):
            while True:
                # The engine has half of the time; in the rest, it can say that it had no time for this.
                own_timeout = max(timeout / 2 - (time.monotonic() - began), 0.1)
                try:
                    await _infer(module, connection, model, request, own_timeout)
                    return ModelHealth(model, True, f"answered in {time.monotonic() - began:.2f} s")
                except Exception as error:
                    refused = as_client_error(error)
                if BUSY.search(str(refused)):
                    return ModelHealth(model, True, f"busy ({_one_line(refused)})")
                if not isinstance(refused, (InvalidRequestError, ServerError)):
                    return ModelHealth(model, False, _one_line(refused))
                if problem is None or isinstance(refused, ServerError):
                    problem = refused
                remedy = _remedy(untried, str(refused))
                if remedy is None:
                    return ModelHealth(model, False, _one_line(problem))
                untried.remove(remedy)
                request = {**request, **remedy[1]}
    except TimeoutError:
        return ModelHealth(model, False, f"no answer within {timeout:g} s, not even that it is busy")


def _remedy(untried: list[tuple[str, Request]], message: str) -> tuple[str, Request] | None:
    """What helps against the message: the field that it names first; None if there is nothing left to change."""
    words = re.findall(r"\w+", message)
    named = [remedy for remedy in untried if remedy[0] in words]
    if named:
        return min(named, key=lambda remedy: words.index(remedy[0]))
    return next((remedy for remedy in untried if remedy in REMEDIES[:UNNAMED]), None)


async def _infer(module: Any, connection: Any, model: str, request: Request, timeout: float) -> None:
    """Send one request, and wait for its picture."""
    tensors = [
        ("prompt", "BYTES", np.array([[b"health check"]], np.object_)),
        ("priority", "INT32", np.array([[FIRST]], np.int32)),  # a parameter of this name is Triton's own
    ]
    if request.get("image"):
        tensors.append(("image", "UINT8", np.full((1, 64, 64, 3), 127, np.uint8)))
    inputs = [module.InferInput(name, tensor.shape, datatype) for name, datatype, tensor in tensors]
    for infer_input, (_, _, tensor) in zip(inputs, tensors, strict=True):
        infer_input.set_data_from_numpy(tensor)
    await connection.infer(
        model,
        inputs,
        outputs=[module.InferRequestedOutput("receipt")],
        parameters={name: value for name, value in request.items() if name != "image" and value is not None},
        timeout=round(timeout * MICROSECONDS),
    )


def _one_line(error: BaseException | None) -> str:
    return " ".join(str(error).split())
