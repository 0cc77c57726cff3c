"""Reads a picture back into a scene by plain image processing; nothing here is learned."""

import math
from dataclasses import dataclass
from statistics import fmean

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from training.shapes.scenes import COLOURS, SHAPES, SIZES, Point, Scene, coverage
from training.shapes.styles import GROWTH, STROKE

Array = NDArray[np.float64]

# A picture whose pixels all lie within this RGB distance of its background shows nothing.
BLANK_DISTANCE = 40.0

# A shape is outlined when the background shows in at least this share of what its line encloses.
LEAST_HOLLOW = 0.05


@dataclass(frozen=True)
class Reading:
    """The scene a picture shows, and how well the shape fits its ideal (intersection over union, 0 to 1).

    `hollow` is the share of the area within a closed outline in which the background shows: 0 for a filled shape.
    """

    scene: Scene
    overlap: float
    hollow: float

    @property
    def is_outlined(self) -> bool:
        return self.hollow >= LEAST_HOLLOW


def _nearest_colour(rgb: Array) -> str:
    return min(COLOURS, key=lambda name: float(np.linalg.norm(rgb - np.array(COLOURS[name]))))


def _area(outline: list[Point]) -> float:
    """The area a polygon encloses (shoelace formula)."""
    following = outline[1:] + outline[:1]
    return abs(sum(x * v - u * y for (x, y), (u, v) in zip(outline, following, strict=True))) / 2


def _foreground(pixels: Array, background: Array, colour: Array) -> Array:
    """How far each pixel is on the way from the background (0) to the colour of the shape (1)."""
    way = colour - background
    share = (pixels - background) @ way / (way @ way)
    # The outer fifths count as pure, so that a slightly uneven surface adds nothing.
    return np.clip((share - 0.2) / 0.6, 0, 1)


def _enclosed(mask: Array) -> NDArray[np.bool_]:
    """Which pixels of the background cannot be reached from the border without crossing the foreground."""
    ground = mask <= 0.5
    reached = np.zeros_like(ground)
    while True:
        around = np.pad(reached, 1, constant_values=True)  # beyond the picture all is outside
        grown = ground & (around[:-2, 1:-1] | around[2:, 1:-1] | around[1:-1, :-2] | around[1:-1, 2:])
        if np.array_equal(grown, reached):
            return ground & ~reached
        reached = grown


def _overlap(shape: str, radius: float, centre: Point, mask: Array) -> float:
    ideal = np.asarray(coverage(shape, radius, centre, *mask.shape)) / 255
    return float(np.minimum(mask, ideal).sum() / np.maximum(mask, ideal).sum())


def read(picture: Image.Image) -> Reading | None:
    """Reads an RGB picture of any size; None when it shows nothing but background.

    An outlined shape is read as if its inside were filled.

    The border tells the background. For each shape, the ideal outline of the same area is laid over the
    foreground's centre of mass; the one that overlaps best is the shape, and its radius tells the size.
    """
    pixels = np.asarray(picture.convert("RGB"), dtype=np.float64)
    border = np.concatenate([pixels[0], pixels[-1], pixels[:, 0], pixels[:, -1]])
    background = np.median(border, axis=0)

    distance = np.linalg.norm(pixels - background, axis=2)
    farthest = float(np.percentile(distance, 98))  # not the maximum: a few odd pixels are no shape
    if farthest < BLANK_DISTANCE:
        return None
    colour = np.median(pixels[distance > 0.7 * farthest], axis=0)

    mask = _foreground(pixels, background, colour)
    enclosed = _enclosed(mask)
    mask[enclosed] = 1
    area = float(mask.sum())
    rows, columns = np.indices(mask.shape) + 0.5
    centre = (float((mask * columns).sum() / area), float((mask * rows).sum() / area))

    radii = {shape: math.sqrt(area / _area(outline)) for shape, outline in SHAPES.items()}
    overlaps = {shape: _overlap(shape, radius, centre, mask) for shape, radius in radii.items()}
    shape = max(overlaps, key=overlaps.__getitem__)
    hollow = float(enclosed.sum()) / area
    # What an outline adds to the radius, on average.
    line = fmean(GROWTH.values()) + STROKE / 2 if hollow >= LEAST_HOLLOW else 0.0
    radius = radii[shape] / picture.height - line
    size = min(SIZES, key=lambda name: abs(math.log(radius / SIZES[name])))
    scene = Scene(size, _nearest_colour(colour), shape, _nearest_colour(background))
    return Reading(scene, overlaps[shape], hollow)
