"""The shapes' vocabulary, drawing and reader agree with each other."""

from random import Random

import pytest
from PIL import Image, ImageChops, ImageFilter

from training.shapes.reader import read
from training.shapes.scenes import (
    COLOURS,
    SHAPES,
    SIZES,
    Scene,
    draw,
    every_scene,
    random_caption,
    random_scene,
)


def test_every_scene_is_there_once() -> None:
    scenes = every_scene()
    assert len(scenes) == len(set(scenes)) == len(SIZES) * len(SHAPES) * len(COLOURS) * (len(COLOURS) - 1)
    assert len({scene.caption() for scene in scenes}) == len(scenes)
    assert all(scene.colour != scene.background for scene in scenes)


@pytest.mark.parametrize(
    ("scene", "caption"),
    [
        (Scene("large", "red", "circle", "blue"), "a large red circle on a blue background"),
        (Scene("small", "black", "star", "orange"), "a small black star on an orange background"),
    ],
)
def test_caption(scene: Scene, caption: str) -> None:
    assert scene.caption() == caption


def test_partial_captions() -> None:
    scene = Scene("small", "orange", "star", "white")
    assert scene.caption(with_size=False, with_background=False) == "an orange star"
    assert scene.caption(with_colour=False, with_background=False) == "a small star"


def test_training_captions_name_nothing_but_their_scene() -> None:
    random = Random(0)
    captions = []
    for _ in range(1000):
        scene = random_scene(random)
        captions.append(random_caption(scene, random))
        others = {*SIZES, *SHAPES, *COLOURS} - {scene.size, scene.shape, scene.colour, scene.background}
        assert others.isdisjoint(captions[-1].split())
        if captions[-1] and "background" not in captions[-1]:
            assert scene.background == ("black" if scene.colour == "white" else "white")
    assert 90 < captions.count("") < 170


def test_scenes_and_drawing_follow_from_the_seed() -> None:
    def drawn(seed: int) -> tuple[Scene, bytes]:
        random = Random(seed)
        scene = random_scene(random)
        return scene, draw(scene, random).tobytes()

    assert drawn(3) == drawn(3)
    assert drawn(3) != drawn(4)


@pytest.mark.parametrize(("height", "width"), [(64, 64), (64, 96)])
def test_reads_every_drawn_scene(height: int, width: int) -> None:
    random = Random(height + width)
    for scene in every_scene():
        reading = read(draw(scene, random, height, width))
        assert reading is not None
        assert reading.scene == scene
        assert reading.overlap > 0.9


def test_reads_soft_edges() -> None:
    random = Random(1)
    for scene in random.sample(every_scene(), 200):
        reading = read(draw(scene, random).filter(ImageFilter.GaussianBlur(1.2)))
        assert reading is not None
        assert reading.scene == scene
        assert reading.overlap > 0.85


def test_reads_slightly_noisy_colours() -> None:
    random = Random(2)
    for scene in random.sample(every_scene(), 200):
        noise = Image.merge("RGB", [Image.effect_noise((64, 64), 12) for _ in range(3)])
        reading = read(ImageChops.add(draw(scene, random), noise, offset=-128))
        assert reading is not None
        assert reading.scene == scene


def test_plain_picture_shows_nothing() -> None:
    assert read(Image.new("RGB", (64, 64), COLOURS["green"])) is None


def test_a_blob_overlaps_no_shape_well() -> None:
    picture = Image.new("RGB", (64, 64), COLOURS["white"])
    picture.paste(COLOURS["black"], (4, 28, 60, 36))
    reading = read(picture)
    assert reading is not None
    assert reading.overlap < 0.75
