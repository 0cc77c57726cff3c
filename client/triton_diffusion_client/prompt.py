"""What a caller may pass as a prompt."""

from __future__ import annotations

import io
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import PIL.ImageOps

from triton_diffusion.errors import did_you_mean
from triton_diffusion_client.errors import InvalidRequestError

ImageInput = PIL.Image.Image | np.ndarray[Any, Any] | bytes | str | os.PathLike[str]
"""An input image: PIL, an array [H, W, 3] of UINT8, the bytes of an image file, or its path."""


Prompt = str | Mapping[str, object]
"""A string, or a dict with `prompt`, `negative_prompt` and `multi_modal_data`, by vLLM-Omni's names."""

PROMPT_KEYS = ("prompt", "negative_prompt", "multi_modal_data")


def prompt_inputs(prompt: Prompt) -> dict[str, Any]:
    """The request's fields that come from the prompt: `prompt`, `negative_prompt`, `image` [H, W, 3].

    Raises:
        InvalidRequestError: an unknown key, or an image that cannot be read.
    """
    if isinstance(prompt, str):
        return {"prompt": prompt}
    if not isinstance(prompt, Mapping):
        raise InvalidRequestError(f"a prompt is a string or a dict, not {type(prompt).__name__}")
    for name in prompt:
        if name not in PROMPT_KEYS:
            raise InvalidRequestError(f"unknown key {name!r} of a prompt{did_you_mean(name, PROMPT_KEYS)}")
    if "prompt" not in prompt:
        raise InvalidRequestError("a prompt dict needs the key 'prompt'")
    inputs: dict[str, Any] = {name: prompt[name] for name in ("prompt", "negative_prompt") if name in prompt}
    if inputs.get("negative_prompt", "") is None:
        del inputs["negative_prompt"]
    media = prompt.get("multi_modal_data", {})
    if not isinstance(media, Mapping):
        raise InvalidRequestError(f"multi_modal_data is a dict, not {type(media).__name__}")
    for name in media:
        if name != "image":
            raise InvalidRequestError(f"unknown key {name!r} of multi_modal_data; known is: image")
    if "image" in media:
        inputs["image"] = read_image(media["image"])
    return inputs


def read_image(image: ImageInput) -> np.ndarray[Any, Any]:
    """An input image as UINT8 [H, W, 3].

    Raises:
        InvalidRequestError: it is no image.
    """
    if isinstance(image, np.ndarray):
        return image
    try:
        if isinstance(image, bytes):
            image = PIL.Image.open(io.BytesIO(image))
        elif not isinstance(image, PIL.Image.Image):
            image = PIL.Image.open(Path(image))
        upright = PIL.ImageOps.exif_transpose(image)
        return np.asarray(upright.convert("RGB"))
    except (OSError, TypeError, ValueError, AttributeError) as error:
        raise InvalidRequestError(f"image cannot be read: {error}") from error
