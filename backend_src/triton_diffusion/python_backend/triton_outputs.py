"""The outputs of a request: their declaration, and the tensors made for those that were asked for."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Set
from dataclasses import dataclass
from typing import Any

import numpy as np
import PIL.Image

from triton_diffusion.errors import FieldValueError
from triton_diffusion.output import DiffusionOutput
from triton_diffusion.receipt import Receipt


@dataclass(frozen=True)
class OutputDeclaration:
    """A Triton output; `dims` without the batch dimension."""

    triton_type: str
    dims: list[int]
    description: str


OUTPUTS = {
    "images": OutputDeclaration("TYPE_UINT8", [-1, -1, -1, 3], "Raw pixels [n, H, W, 3]; only when it is named."),
    "videos": OutputDeclaration(
        "TYPE_UINT8", [-1, -1, -1, -1, 3], "Raw pixels [n, F, H, W, 3]; only when it is named."
    ),
    "generated_image": OutputDeclaration(
        "TYPE_STRING", [-1], "A base64 file for each image (a video as an animation)."
    ),
    "seed_used": OutputDeclaration("TYPE_INT64", [-1], "The seed of each image."),
    "receipt": OutputDeclaration("TYPE_STRING", [1], "JSON: what happened to the request (see `Receipt`)."),
}
"""Every output by name."""

FRAME_MILLISECONDS = 1000 / 16
"""How long an animation shows a frame: 16 frames a second, as Wan was trained on."""

RAW_OUTPUTS = frozenset({"images", "videos"})


def select_outputs(requested: Set[str]) -> Set[str]:
    """The outputs to make.

    A client that names none is reported by Triton as one that wants all: it gets the ones that every client can
    read. Raw pixels, many megabytes as JSON, are for clients that name them.
    """
    return requested - RAW_OUTPUTS if requested >= OUTPUTS.keys() else requested


def check_outputs(selected: Set[str], raw: str | None) -> None:
    """
    Args:
        raw: the output that holds this model's raw pixels; None if it is not known yet.

    Raises:
        FieldValueError: raw pixels were asked for by a name that this model does not make.
    """
    if raw is not None and selected & RAW_OUTPUTS and raw not in selected:
        raise FieldValueError(f"output {min(selected & RAW_OUTPUTS)!r} is not made by this model: ask for {raw!r}")


def make_outputs(selected: Set[str], output: DiffusionOutput, receipt: Receipt) -> dict[str, np.ndarray[Any, Any]]:
    """The selected outputs by name, each with Triton's batch dimension of 1 in front.

    Raises:
        FieldValueError: an output was asked for that this pipeline does not make.
    """
    pixels = output.output
    assert pixels is not None
    raw = "images" if pixels.ndim == 4 else "videos"
    check_outputs(selected, raw)
    makers: dict[str, Callable[[], np.ndarray[Any, Any]]] = {
        raw: lambda: np.ascontiguousarray(pixels),
        "generated_image": lambda: np.array(
            [encode(picture, receipt.sampling_params.output_format or "png") for picture in pixels],
            dtype=object,
        ),
        "seed_used": lambda: np.array(receipt.sampling_params.row_seeds(), dtype=np.int64),
        "receipt": lambda: np.array([receipt.to_json().encode()], dtype=object),
    }
    return {name: make()[None] for name, make in makers.items() if name in selected}


def encode(picture: np.ndarray[Any, Any], file_format: str) -> bytes:
    """An image [H, W, 3], or a video [F, H, W, 3] as an animation, as a base64-encoded file.

    Raises:
        FieldValueError: a video as JPEG.
    """
    frames = [PIL.Image.fromarray(frame) for frame in (picture if picture.ndim == 4 else picture[None])]
    animation: dict[str, Any] = {}
    if picture.ndim == 4:
        if file_format == "jpeg":
            raise FieldValueError("output_format='jpeg' holds one image: ask for 'webp' or 'png' for a video")
        animation = {"save_all": True, "append_images": frames[1:], "duration": FRAME_MILLISECONDS}
    file = io.BytesIO()
    frames[0].save(file, format=file_format, **animation)
    return base64.b64encode(file.getvalue())
