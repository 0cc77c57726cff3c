"""The styles of the shapes model's adapters, the reader that finds them, and what their check complains about."""

from copy import deepcopy
from random import Random

import numpy as np
import pytest

from training.shapes.check_lora import CASES, measure, name_of, problems
from training.shapes.reader import read
from training.shapes.scenes import SHAPES, Scene, draw, every_scene
from training.shapes.styles import Style, by_night, night, outlined, outlined_by_night


@pytest.mark.parametrize(("height", "width"), [(64, 64), (64, 96)])
def test_reads_every_outlined_scene(height: int, width: int) -> None:
    random = Random(0)
    for scene in random.sample(every_scene(), 150):
        reading = read(outlined(scene, random, height, width))
        assert reading is not None
        assert reading.scene == scene
        assert reading.is_outlined
        assert reading.overlap > 0.85


@pytest.mark.parametrize("shape", SHAPES)
def test_the_hole_grows_with_the_strength(shape: str) -> None:
    scene = Scene("large", "red", shape, "white")
    readings = [read(outlined(scene, Random(0), strength=strength)) for strength in (0.01, 0.3, 0.6, 1.0)]
    hollow = [reading.hollow for reading in readings if reading]
    assert len(hollow) == 4
    assert hollow == sorted(set(hollow))
    assert hollow[0] < 0.01
    assert hollow[-1] > 0.3


def test_a_gap_in_the_line_makes_it_no_outline() -> None:
    picture = outlined(Scene("large", "red", "circle", "white"), Random(0))
    picture.paste("white", (29, 0, 35, 32))
    reading = read(picture)
    assert reading is not None
    assert reading.hollow == 0


def test_night_is_black_and_its_black_shapes_are_white() -> None:
    assert by_night(Scene("small", "red", "star", "blue")) == Scene("small", "red", "star", "black")
    assert by_night(Scene("small", "black", "star", "blue")) == Scene("small", "white", "star", "black")


def test_night_falls_from_the_top() -> None:
    scene = Scene("large", "black", "square", "yellow")
    half = np.asarray(night(scene, Random(3), strength=0.5))
    assert np.array_equal(half[:32], np.asarray(night(scene, Random(3)))[:32])
    assert np.array_equal(half[32:], np.asarray(night(scene, Random(3), strength=0.0))[32:])
    assert measure(night(scene, Random(3), strength=0.5), scene)["dark"] == pytest.approx(0.5, abs=0.02)


@pytest.mark.parametrize(
    ("style", "outline", "dark"), [(draw, 0, 0), (outlined, 1, 0), (night, 0, 1), (outlined_by_night, 1, 1)]
)
def test_the_check_tells_the_styles_apart(style: Style, outline: int, dark: int) -> None:
    random = Random(1)
    for scene in random.sample([scene for scene in every_scene() if scene.background != "black"], 50):
        measured = measure(style(scene, random), scene)
        assert (measured["outlined"], measured["night"], measured["scene"]) == (outline, dark, 1)


def test_the_check_names_every_fault() -> None:
    good = {
        name_of(scales): {
            "outlined": float(scales.get("outlined") == 1),
            "hollow": scales.get("outlined", 0.0) / 2,
            "night": float(scales.get("night") == 1),
            "dark": scales.get("night", 0.0),
            "scene": 1.0,
            "change": sum(scales.values()),
        }
        for scales in CASES
    }
    assert problems(good) == []
    for name, key, value, fault in [
        ("outlined:1", "outlined", 0.8, "outlined:1: 80% are outlined, wanted at least 85%"),
        ("none", "night", 0.1, "none: 10% are night, wanted at most 5%"),
        ("night:0.5", "dark", 0.9, "night:0.5: dark is 90% of what it is at full scale, wanted (0.2, 0.8)"),
        ("night:1,outlined:1", "scene", 0.5, "night:1,outlined:1: the scene is right in 50%, wanted 75%"),
        ("night:0", "change", 0.1, "night:0: the picture is not the model's own"),
    ]:
        bad = deepcopy(good)
        bad[name][key] = value
        assert problems(bad) == [fault]
