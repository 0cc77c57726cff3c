"""Styles that adapters learn: other ways to draw a scene, each with a strength from 0 (as it is) to 1."""

from collections.abc import Callable
from dataclasses import replace
from random import Random

from PIL import Image, ImageChops

from training.shapes.scenes import SIZES, Scene, coverage, draw, painted, random_centre

# Called like the functions below.
Style = Callable[..., Image.Image]

# How wide the line of an outlined shape is, and how much its radius grows, so that a small one has room inside; as
# fractions of the picture's height.
STROKE = 0.094
GROWTH = {"small": 0.05, "large": 0.0}


def outlined(scene: Scene, random: Random, height: int = 64, width: int = 64, strength: float = 1.0) -> Image.Image:
    """The outline of the shape; at less than full strength its inside is filled but for a hole of the same form."""
    centre = random_centre(random, height, width)
    radius = (SIZES[scene.size] + GROWTH[scene.size]) * height
    line = coverage(scene.shape, radius, centre, height, width, STROKE * height)
    surface = coverage(scene.shape, radius, centre, height, width)
    hole = coverage(scene.shape, radius * strength, centre, height, width)
    return painted(scene, ImageChops.lighter(line, ImageChops.subtract(surface, hole)))


def by_night(scene: Scene) -> Scene:
    """The scene on a black background; a black shape turns white."""
    return replace(scene, colour="white" if scene.colour == "black" else scene.colour, background="black")


def night(scene: Scene, random: Random, height: int = 64, width: int = 64, strength: float = 1.0) -> Image.Image:
    """The scene by night; at less than full strength the night has come down only so far from the top."""
    place = random.random()
    picture, dark = (draw(one, Random(place), height, width) for one in (scene, by_night(scene)))
    picture.paste(dark.crop((0, 0, width, round(strength * height))))
    return picture


def outlined_by_night(
    scene: Scene, random: Random, height: int = 64, width: int = 64, strength: float = 1.0
) -> Image.Image:
    """The outline of the shape by night, as both adapters together are to draw it."""
    return outlined(by_night(scene), random, height, width, strength)
