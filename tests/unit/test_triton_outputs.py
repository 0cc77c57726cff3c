"""Which outputs are made for whom."""

from __future__ import annotations

import base64
import io

import numpy as np
import PIL.Image
import pytest

from tests.receipts import receipt_of
from triton_diffusion.errors import FieldValueError
from triton_diffusion.output import DiffusionOutput
from triton_diffusion.python_backend.triton_outputs import OUTPUTS, make_outputs, select_outputs
from triton_diffusion.receipt import Receipt

PIXELS = np.random.default_rng(0).integers(0, 256, [2, 8, 8, 3], np.uint8)


def receipt(**params: str) -> Receipt:
    return receipt_of(seed=5, num_images_per_prompt=2, **params)


def test_a_client_that_names_no_output_gets_those_that_everyone_can_read() -> None:
    # Triton reports "none named" as "all named".
    assert select_outputs(set(OUTPUTS)) == {"generated_image", "seed_used", "receipt"}


def test_a_client_that_names_outputs_gets_these() -> None:
    assert select_outputs({"images", "seed_used"}) == {"images", "seed_used"}


def test_raw_pixels_have_tritons_batch_dimension() -> None:
    outputs = make_outputs({"images", "videos", "seed_used"}, DiffusionOutput(output=PIXELS), receipt())
    assert set(outputs) == {"images", "seed_used"}
    assert np.array_equal(outputs["images"], PIXELS[None])
    assert outputs["seed_used"].tolist() == [[5, 6]]


@pytest.mark.parametrize("file_format", ["png", "webp", "jpeg"])
def test_generated_images_are_files_of_the_asked_format(file_format: str) -> None:
    outputs = make_outputs({"generated_image"}, DiffusionOutput(output=PIXELS), receipt(output_format=file_format))
    files = [PIL.Image.open(io.BytesIO(base64.b64decode(file))) for file in outputs["generated_image"][0]]
    assert [(file.format, file.size) for file in files] == [(file_format.upper(), (8, 8))] * 2


def test_png_loses_nothing() -> None:
    outputs = make_outputs({"generated_image"}, DiffusionOutput(output=PIXELS), receipt())
    image = PIL.Image.open(io.BytesIO(base64.b64decode(outputs["generated_image"][0, 1])))
    assert np.array_equal(np.asarray(image), PIXELS[1])


def test_a_video_is_an_animation() -> None:
    outputs = make_outputs({"generated_image"}, DiffusionOutput(output=PIXELS[None]), receipt(output_format="webp"))
    image = PIL.Image.open(io.BytesIO(base64.b64decode(outputs["generated_image"][0, 0])))
    assert getattr(image, "n_frames", 1) == 2


def test_a_video_cannot_be_a_jpeg() -> None:
    with pytest.raises(FieldValueError, match="output_format='jpeg' holds one image"):
        make_outputs({"generated_image"}, DiffusionOutput(output=PIXELS[None]), receipt(output_format="jpeg"))


def test_an_image_model_makes_no_videos() -> None:
    with pytest.raises(FieldValueError, match="output 'videos' is not made by this model: ask for 'images'"):
        make_outputs({"videos"}, DiffusionOutput(output=PIXELS), receipt())
