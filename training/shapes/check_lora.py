"""Checks the shapes model's LoRA adapters: the same captions and seeds without them, at half and at full scale.

Run it as `python -m training.shapes.check_lora`.
"""

import json
import time
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Annotated, Any

import numpy as np
import torch
import typer
from PIL import Image
from rich.console import Console
from rich.table import Table

from training.shapes.check import compare, sample
from training.shapes.lora import ADAPTERS, CHECKPOINT, load
from training.shapes.reader import read
from training.shapes.scenes import COLOURS, Scene, random_scene, sheet
from training.shapes.styles import by_night

# The adapters that are on, with their scales.
Scales = dict[str, float]
CASES: list[Scales] = [
    {},
    *({name: scale} for name in ADAPTERS for scale in (0.0, 0.5, 1.0)),
    dict.fromkeys(ADAPTERS, 1.0),
]

# Of all pictures: the least that show a style at full scale, the least whose scene is right, the most that show a
# style whose adapter is off; and how strong a style is at half scale, in shares of its strength at full scale.
# An outline counts only when it is closed, and the lines of large stars often have a gap.
LEAST_SHOWN, LEAST_RIGHT, MOST_BY_CHANCE = 0.85, 0.75, 0.05
HALF = (0.2, 0.8)

SHOWN = 16
BLACK_DISTANCE = 60.0


def night_share(picture: Image.Image) -> float:
    """The share of the border that is black."""
    pixels = np.asarray(picture, dtype=np.float64)
    border = np.concatenate([pixels[0], pixels[-1], pixels[:, 0], pixels[:, -1]])
    return float((np.linalg.norm(border - COLOURS["black"], axis=1) < BLACK_DISTANCE).mean())


def measure(picture: Image.Image, wanted: Scene) -> dict[str, float]:
    """How strongly the picture shows each style, whether (0 or 1) it does, and whether its scene is right."""
    found, dark = read(picture), night_share(picture)
    right = found is not None and any("all" in compare(scene, found) for scene in (wanted, by_night(wanted)))
    return {
        "outlined": float(found is not None and found.is_outlined),
        "hollow": found.hollow if found else 0.0,
        "night": float(dark > 0.9),
        "dark": dark,
        "scene": float(right),
    }


def problems(measured: dict[str, dict[str, float]]) -> list[str]:
    """What is not as it should be, given the mean of every measure for each case's name."""
    found = []
    for scales in CASES:
        name, means = name_of(scales), measured[name_of(scales)]
        for style, strength in (("outlined", "hollow"), ("night", "dark")):
            scale = scales.get(style, 0.0)
            if scale == 1 and means[style] < LEAST_SHOWN:
                found.append(f"{name}: {means[style]:.0%} are {style}, wanted at least {LEAST_SHOWN:.0%}")
            if scale == 0 and means[style] > MOST_BY_CHANCE:
                found.append(f"{name}: {means[style]:.0%} are {style}, wanted at most {MOST_BY_CHANCE:.0%}")
            share = means[strength] / max(measured[f"{style}:1"][strength], 0.01)
            if scale == 0.5 and not HALF[0] < share < HALF[1]:
                found.append(f"{name}: {strength} is {share:.0%} of what it is at full scale, wanted {HALF}")
        if scales.get("night") != 0.5 and means["scene"] < LEAST_RIGHT:  # half a night has two backgrounds
            found.append(f"{name}: the scene is right in {means['scene']:.0%}, wanted {LEAST_RIGHT:.0%}")
        if not any(scales.values()) and means["change"]:
            found.append(f"{name}: the picture is not the model's own")
    return found


def name_of(scales: Scales) -> str:
    """As a request names them: "outlined:0.5"."""
    return ",".join(f"{name}:{scale:g}" for name, scale in scales.items()) or "none"


def main(
    checkpoint: Annotated[Path, typer.Argument()] = CHECKPOINT,
    adapters: Annotated[Path, typer.Option(help="The folder of the adapters.")] = CHECKPOINT.parent / "lora",
    captions: Annotated[int, typer.Option(min=1)] = 100,
    seed: int = 4321,
    threads: Annotated[int, typer.Option(min=1)] = 2,
    report: Annotated[Path, typer.Option(help="Where the figures go; the pictures go beside.")] = Path(
        "build/lora-shapes.json"
    ),
) -> None:
    """Exits with 1 when too few pictures show the adapters' styles, or the scene is lost."""
    torch.set_num_threads(threads)
    pipe: Any = load(checkpoint)
    for name in ADAPTERS:
        pipe.load_lora_weights(adapters, weight_name=f"{name}.safetensors", adapter_name=name)
    random = Random(seed)
    every = (random_scene(random) for _ in range(captions * 3))
    scenes = [scene for scene in every if scene.background != "black"][:captions]  # on black, night has no effect

    began = time.monotonic()
    plain: list[Image.Image] = []
    shown: list[Image.Image] = []
    measured: dict[str, dict[str, float]] = {}
    for scales in CASES:
        pipe.enable_lora() if scales else pipe.disable_lora()
        if scales:
            pipe.set_adapters(list(scales), list(scales.values()))
        pictures = sample(pipe, scenes, height=64, width=64, steps=20, guidance=4.0)
        plain, shown = plain or pictures, shown + pictures[:SHOWN]
        each = [measure(picture, scene) for picture, scene in zip(pictures, scenes, strict=True)]
        means = {key: round(fmean(one[key] for one in each), 3) for key in each[0]}
        pixels, plain_pixels = ([np.asarray(one, np.int16) for one in group] for group in (pictures, plain))
        change = float(np.abs(np.subtract(pixels, plain_pixels)).mean())  # of 255
        measured[name_of(scales)] = means | {"change": round(change, 2)}
    missed = problems(measured)

    table = Table("adapters", *measured["none"], title=f"{captions} random captions")
    for name, means in measured.items():
        table.add_row(name, *(f"{value:.2f}" if key == "change" else f"{value:.0%}" for key, value in means.items()))
    Console().print(table, *missed, f"{time.monotonic() - began:.0f} seconds", sep="\n")
    report.parent.mkdir(parents=True, exist_ok=True)
    figures = {"captions": captions, "seed": seed, "means": measured, "missed": missed}
    report.write_text(json.dumps(figures, indent=2) + "\n")
    sheet(shown, columns=SHOWN).save(report.with_suffix(".png"))
    if missed:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
