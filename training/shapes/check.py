"""Checks the shapes model: samples random captions with the stock pipeline and reads the pictures back.

Run it as `python -m training.shapes.check`.
"""

import json
import time
from collections import Counter
from pathlib import Path
from random import Random
from typing import Annotated, Any

import torch
import typer
from diffusers import StableDiffusion3Pipeline
from PIL import Image
from rich.console import Console
from rich.table import Table

from training.shapes.reader import Reading, read
from training.shapes.scenes import SHAPES, Scene, random_scene, sheet

# As the model is served: the empty tokens of an absent T5 only cost time.
MAX_SEQUENCE_LENGTH = 16

# A shape counts only when it overlaps its ideal outline at least this much (intersection over union).
LEAST_OVERLAP = 0.75

# The least share of pictures that must be right.
THRESHOLDS = {"both colours": 0.97, "shape": 0.92, "size": 0.95}
ASPECTS = ("colour of shape", "colour of background", "both colours", "shape", "size", "all")


def sample(
    pipe: Any,
    scenes: list[Scene],
    height: int,
    width: int,
    steps: int,
    guidance: float,
) -> list[Image.Image]:
    """One picture for each scene's full caption, seeded by its position, in batches of 20."""
    pictures: list[Image.Image] = []
    for start in range(0, len(scenes), 20):
        batch = scenes[start : start + 20]
        pictures += pipe(
            [scene.caption() for scene in batch],
            height=height,
            width=width,
            num_inference_steps=steps,
            guidance_scale=guidance,
            max_sequence_length=MAX_SEQUENCE_LENGTH,
            generator=[torch.Generator().manual_seed(start + row) for row in range(len(batch))],
        ).images
    return pictures


def compare(wanted: Scene, found: Reading | None) -> set[str]:
    """The aspects in which the picture is as wanted."""
    if found is None:
        return set()
    scene = found.scene
    right = {
        "colour of shape": scene.colour == wanted.colour,
        "colour of background": scene.background == wanted.background,
        "shape": scene.shape == wanted.shape and found.overlap >= LEAST_OVERLAP,
        "size": scene.size == wanted.size,
    }
    right["both colours"] = right["colour of shape"] and right["colour of background"]
    right["all"] = all(right.values())
    return {aspect for aspect, holds in right.items() if holds}


def result_table(right: list[set[str]], scenes: list[Scene]) -> Table:
    """How often each aspect is right, in all and for each shape."""
    table = Table(title=f"{len(scenes)} random captions")
    for column in ("right", "wanted", "found", *SHAPES):
        table.add_column(column, justify="left" if column == "right" else "right")
    for aspect in ASPECTS:
        found = sum(aspect in one for one in right) / len(right)
        wanted = THRESHOLDS.get(aspect)
        good = wanted is None or found >= wanted
        by_shape = Counter(scene.shape for scene, one in zip(scenes, right, strict=True) if aspect in one)
        count = Counter(scene.shape for scene in scenes)
        table.add_row(
            aspect,
            "" if wanted is None else f"{wanted:.0%}",
            f"{found:.1%}" if good else f"[red]{found:.1%}[/red]",
            *(f"{by_shape[shape]}/{count[shape]}" for shape in SHAPES),
        )
    return table


def main(
    checkpoint: Annotated[Path, typer.Argument()] = Path("model_repository/shapes/1/checkpoint"),
    captions: Annotated[int, typer.Option(min=1)] = 200,
    steps: Annotated[int, typer.Option(min=1)] = 20,
    guidance: float = 4.0,
    height: int = 64,
    width: int = 64,
    seed: int = 1234,
    threads: Annotated[int, typer.Option(min=1)] = 2,
    report: Annotated[Path, typer.Option(help="Where the counts go; the pictures go beside.")] = Path(
        "build/shapes.json"
    ),
) -> None:
    """Exits with 1 when too few pictures show what their captions say."""
    torch.set_num_threads(threads)
    pipe: Any = StableDiffusion3Pipeline.from_pretrained(checkpoint, text_encoder_3=None, tokenizer_3=None)
    pipe.set_progress_bar_config(disable=True)

    random = Random(seed)
    scenes = [random_scene(random) for _ in range(captions)]
    began = time.monotonic()
    pictures = sample(pipe, scenes, height, width, steps, guidance)
    seconds = time.monotonic() - began

    readings = [read(picture) for picture in pictures]
    right = [compare(scene, reading) for scene, reading in zip(scenes, readings, strict=True)]
    counts = {aspect: sum(aspect in one for one in right) for aspect in ASPECTS}
    missed = [aspect for aspect, share in THRESHOLDS.items() if counts[aspect] < share * captions]

    console = Console()
    console.print(result_table(right, scenes))
    for position, (scene, reading, one) in enumerate(zip(scenes, readings, right, strict=True)):
        if "all" not in one:
            shown = f"{reading.scene.caption()}, overlap {reading.overlap:.2f}" if reading else "nothing"
            console.print(f"{position}: wanted {scene.caption()}, found {shown}")
    console.print(f"{seconds:.0f} seconds, {steps} steps, guidance {guidance:g}, {width} x {height} pixels")

    report.parent.mkdir(parents=True, exist_ok=True)
    settings = {"steps": steps, "guidance": guidance, "height": height, "width": width, "seed": seed}
    result = {"captions": captions, "right": counts, "thresholds": THRESHOLDS, "missed": missed}
    report.write_text(json.dumps(settings | result | {"seconds": round(seconds, 1)}, indent=2) + "\n")
    wrong = frozenset(position for position, one in enumerate(right) if "all" not in one)
    sheet(pictures[:40], columns=8, framed=wrong).save(report.with_suffix(".png"))
    if missed:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
