"""One value of a request, checked: every refusal names the field, the value and what is allowed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from triton_diffusion.errors import FieldTypeError, FieldValueError
from triton_diffusion.request import FIELDS


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("height", 512, 512),
        ("height", np.array([[512]], np.int32), 512),
        ("seed", np.array([[2**63 - 1]], np.int64), 2**63 - 1),
        ("guidance_scale", 5, 5.0),
        ("guidance_scale", np.array([7.5], np.float32), 7.5),
        ("prompt", np.array([[b"a cat"]], object), "a cat"),
        ("prompt", "ein Kätzchen 🐈", "ein Kätzchen 🐈"),
        ("negative_prompt", "", ""),
        ("output_format", b"webp", "webp"),
    ],
)
def test_a_good_value_is_converted_to_python(name: str, value: object, expected: object) -> None:
    parsed = FIELDS[name].parse(value)
    assert parsed == expected
    assert type(parsed) is type(expected)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("num_inference_steps", 0, "num_inference_steps=0: must be an integer from 1 to 1000"),
        ("seed", -1, "seed=-1: must be an integer from 0 to 9223372036854775807"),
        ("guidance_scale", float("nan"), "guidance_scale=nan: must be a number from 0 to 100"),
        ("guidance_scale", np.array([np.inf], np.float32), "guidance_scale=inf: must be a number from 0 to 100"),
        ("strength", 1.5, "strength=1.5: must be a number from 0 to 1"),
        ("output_format", "gif", "output_format='gif': must be one of png, jpeg, webp"),
        ("prompt", "", "prompt='' has 0 characters: must be a string of 1 to 10000 characters"),
        ("prompt", " \n", "is blank"),
        ("prompt", "x" * 10_001, "has 10001 characters: must be a string of 1 to 10000 characters"),
        ("prompt", np.array([[b"a", b"b"]], object), "prompt holds 2 values: send one request for each prompt"),
        ("height", np.zeros([0], np.int32), "height holds 0 values: send exactly one"),
        ("image", np.zeros([4, 4, 4], np.uint8), r"image has shape \[4, 4, 4\]: must be \[height, width, 3\]"),
        ("image", np.zeros([2, 4, 4, 3], np.uint8), "one image"),
        ("image", np.zeros([1, 0, 4, 3], np.uint8), r"image has shape \[0, 4, 3\]"),
    ],
)
def test_a_value_out_of_bounds_is_refused(name: str, value: object, message: str) -> None:
    with pytest.raises(FieldValueError, match=message):
        FIELDS[name].parse(value)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("height", 512.0, "height=512.0 is of type float: must be an integer"),
        ("height", "512", "height='512' is of type str: must be an integer"),
        ("height", True, "height=True is of type bool: must be an integer"),
        ("guidance_scale", "7", "guidance_scale='7' is of type str: must be a number"),
        ("guidance_scale", None, "is of type NoneType"),
        ("prompt", 5, "prompt=5 is of type int: must be a string"),
        ("prompt", b"no\xff\xfe", "not valid UTF-8 .* at byte 2.*; encode the text as UTF-8"),
        ("image", np.zeros([4, 4, 3], np.float32), "image: must be a UINT8 tensor"),
        ("image", "picture.png", "image: must be a UINT8 tensor"),
    ],
)
def test_a_value_of_the_wrong_type_is_refused(name: str, value: object, message: str) -> None:
    with pytest.raises(FieldTypeError, match=message):
        FIELDS[name].parse(value)


def test_a_long_value_is_cut_in_the_message() -> None:
    with pytest.raises(FieldValueError) as refused:
        FIELDS["prompt"].parse("x" * 1_000_000)
    assert len(str(refused.value)) < 200


def test_the_table_speaks_triton() -> None:
    types: dict[str, Any] = {name: (declared.triton_type, declared.dims) for name, declared in FIELDS.items()}
    assert types["prompt"] == ("TYPE_STRING", [1])
    assert types["seed"] == ("TYPE_INT64", [1])
    assert types["height"] == ("TYPE_INT32", [1])
    assert types["guidance_scale"] == ("TYPE_FP32", [1])
    assert types["image"] == ("TYPE_UINT8", [-1, -1, 3])
    assert [name for name, declared in FIELDS.items() if declared.required] == ["prompt"]
