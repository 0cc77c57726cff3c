"""Scenes: one coloured shape on a plain background, with its caption and its picture."""

import math
from dataclasses import dataclass
from itertools import permutations, product
from random import Random

from PIL import Image, ImageDraw

COLOURS: dict[str, tuple[int, int, int]] = {
    "red": (220, 40, 40),
    "green": (40, 180, 70),
    "blue": (50, 80, 220),
    "yellow": (240, 210, 50),
    "purple": (150, 60, 190),
    "orange": (245, 140, 30),
    "white": (245, 245, 245),
    "black": (20, 20, 20),
}

# The radius of a shape as a fraction of the picture's height.
SIZES: dict[str, float] = {"small": 0.18, "large": 0.36}

# How far the centre may lie from the middle, as a fraction of the picture's height.
WANDER = 0.03

OPENINGS = ("a picture of", "a photo of", "a drawing of")

_SUPERSAMPLING = 4

Point = tuple[float, float]


def _outline(*radii: float, corners: int, turn: float = 0.0) -> list[Point]:
    """Corners at equal angles, the first one at the top, their distances cycling through `radii`."""
    angles = (math.tau * (corner / corners + turn) - math.pi / 2 for corner in range(corners))
    return [
        (radii[corner % len(radii)] * math.cos(angle), radii[corner % len(radii)] * math.sin(angle))
        for corner, angle in enumerate(angles)
    ]


# Every outline has its centre of mass at the origin; the radii make the shapes look equally large.
SHAPES: dict[str, list[Point]] = {
    "circle": _outline(1.0, corners=96),
    "square": _outline(0.88 * math.sqrt(2), corners=4, turn=1 / 8),
    "triangle": _outline(1.15, corners=3),
    "star": _outline(1.15, 0.52, corners=10),
}


def _with_article(words: str) -> str:
    return f"{'an' if words[0] in 'aeiou' else 'a'} {words}"


@dataclass(frozen=True)
class Scene:
    """What a picture shows; `background` is a colour other than `colour`."""

    size: str
    colour: str
    shape: str
    background: str

    def caption(self, with_size: bool = True, with_colour: bool = True, with_background: bool = True) -> str:
        """The scene in words, for example "a large red circle on a blue background"."""
        words = [self.size] * with_size + [self.colour] * with_colour + [self.shape]
        ground = f" on {_with_article(self.background)} background" if with_background else ""
        return _with_article(" ".join(words)) + ground


def every_scene() -> list[Scene]:
    """All scenes the vocabulary can name, in a fixed order."""
    return [
        Scene(size, colour, shape, background)
        for size, shape, (colour, background) in product(SIZES, SHAPES, permutations(COLOURS, 2))
    ]


def random_scene(random: Random) -> Scene:
    """One scene, all equally likely."""
    colour, background = random.sample(list(COLOURS), 2)
    return Scene(random.choice(list(SIZES)), colour, random.choice(list(SHAPES)), background)


def random_caption(scene: Scene, random: Random) -> str:
    """A caption for training: often complete, sometimes as short as people write, or empty.

    A short caption leaves out a large size or a plain background, so that the model learns to take both for
    granted: without a preference, guidance would drive an open choice to neither one nor the other.
    """
    if random.random() < 0.13:  # teaches the unconditional prediction that classifier-free guidance needs
        return ""
    plain = "black" if scene.colour == "white" else "white"
    caption = scene.caption(
        with_size=scene.size != "large" or random.random() < 0.6,
        with_colour=random.random() < 0.95,
        with_background=scene.background != plain or random.random() < 0.4,
    )
    if random.random() < 0.07:
        caption = f"{random.choice(OPENINGS)} {caption}"
    if random.random() < 0.07:
        caption = " ".join(word for word in caption.split() if word not in ("a", "an"))
    return caption


def coverage(
    shape: str, radius: float, centre: Point, height: int, width: int, stroke: float | None = None
) -> Image.Image:
    """How much of each pixel the shape covers, 0 to 255: its surface, or a line of width `stroke` along its edge.

    Radius, centre (x, y) and stroke are in pixels.
    """
    scale = _SUPERSAMPLING
    canvas = Image.new("L", (width * scale, height * scale))
    corners = [((centre[0] + radius * x) * scale, (centre[1] + radius * y) * scale) for x, y in SHAPES[shape]]
    if stroke is None:
        ImageDraw.Draw(canvas).polygon(corners, fill=255)
    else:  # the first edge is drawn twice, so that its corner is joined too
        ImageDraw.Draw(canvas).line(corners + corners[:2], fill=255, width=round(stroke * scale), joint="curve")
    return canvas.reduce(scale)


def random_centre(random: Random, height: int, width: int) -> Point:
    """A place (x, y) near the middle, in pixels."""
    x_wander = WANDER * height + 0.1 * (width - height)
    return (
        width / 2 + random.uniform(-x_wander, x_wander),
        height / 2 + random.uniform(-WANDER, WANDER) * height,
    )


def draw(scene: Scene, random: Random, height: int = 64, width: int = 64) -> Image.Image:
    """An RGB picture of the scene; `random` places the shape near the middle."""
    centre = random_centre(random, height, width)
    return painted(scene, coverage(scene.shape, SIZES[scene.size] * height, centre, height, width))


def painted(scene: Scene, mask: Image.Image) -> Image.Image:
    """The background of the scene, with the colour of its shape where the mask (0 to 255) says."""
    picture = Image.new("RGB", mask.size, COLOURS[scene.background])
    picture.paste(COLOURS[scene.colour], mask=mask)
    return picture


def sheet(pictures: list[Image.Image], columns: int, framed: frozenset[int] = frozenset()) -> Image.Image:
    """The pictures in rows on one sheet, twice their size; those at positions in `framed` get a red frame."""
    width, height = 2 * max(p.width for p in pictures) + 8, 2 * max(p.height for p in pictures) + 8
    rows = math.ceil(len(pictures) / columns)
    paper = Image.new("RGB", (columns * width, rows * height), (128, 128, 128))
    for position, picture in enumerate(pictures):
        left, top = position % columns * width, position // columns * height
        if position in framed:
            paper.paste((255, 0, 60), (left, top, left + 2 * picture.width + 8, top + 2 * picture.height + 8))
        enlarged = picture.resize((2 * picture.width, 2 * picture.height), Image.Resampling.NEAREST)
        paper.paste(enlarged, (left + 4, top + 4))
    return paper
