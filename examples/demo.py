"""The main job on one page: different users' requests, fused on a real Triton server, and each as if it were alone.

Starts Triton with the `shapes` model, sends 16 concurrent requests with mixed steps, guidance, seeds and sizes, one
of them wrong, then 8 with different LoRA adapters, and writes demo.png and build/demo.json. Exits with 1 if anything
is not as it should be.
"""

from __future__ import annotations

import json
import re
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import PIL.ImageDraw
import PIL.ImageFont
from rich.console import Console
from rich.table import Table

from training.shapes.scenes import COLOURS, SHAPES, Scene
from triton_diffusion.embedded import TritonServer
from triton_diffusion_client import DiffusionClient, GenerationResult, SamplingParams

ROOT = Path(__file__).resolve().parents[1]
PICTURE, FIGURES = ROOT / "demo.png", ROOT / "build" / "demo.json"
ALONE = (0, 5, 10, 18, 22)  # the requests that are sent again by themselves
LORAS = {
    "a large red circle on a yellow background": ("", "outlined:0.5", "outlined", "outlined,night"),
    "a large blue star on an orange background": ("", "night:0.5", "night", "outlined,night"),
}
WAVE = re.compile(
    r"wave (?P<wave>\d+): (?P<requests>\d+) requests .*? (?P<rows>\d+) rows, key \[(?P<key>.*?)\], "
    r"waited (?P<waited_ms>[\d.]+) ms, ran (?P<ran_ms>[\d.]+) ms"
)


def requests() -> list[tuple[str, SamplingParams]]:
    """Fifteen good requests of two sizes and one whose height is not a multiple of 8."""
    colours, shapes = list(COLOURS), list(SHAPES)
    made = []
    for number in range(16):
        scene = Scene(
            size="small" if number % 4 in (1, 2) else "large",
            colour=colours[number % 8],
            shape=shapes[number % 4],
            background=colours[(number + 3 + number // 8) % 8],
        )
        params = SamplingParams(
            seed=100 + number,
            num_inference_steps=(20, 16, 28)[number % 3],
            guidance_scale=(4.0, 2.5, 6.0, 3.3)[number % 4],
            height=64,
            width=96 if number % 4 == 3 else 64,
        )
        made.append((scene.caption(), params))
    made[13] = (made[13][0], SamplingParams(seed=113, height=70, width=64))
    return made


def lora_requests() -> list[tuple[str, SamplingParams]]:
    """For each prompt the same request without an adapter, with half of one, with a whole one, and with two."""
    return [(prompt, SamplingParams(seed=7, lora=lora)) for prompt, loras in LORAS.items() for lora in loras]


def main() -> int:
    console = Console(highlight=False, soft_wrap=True)
    began = time.monotonic()
    server = TritonServer(ROOT / "model_repository")
    with console.status("starting Triton"), server:
        console.print(f"Triton is ready after {time.monotonic() - began:.1f} s")
        with DiffusionClient(server.grpc_url, model="shapes") as client:
            results, params, sent = [], [], time.monotonic()
            for group in (requests(), lora_requests()):
                prompts, own = map(list, zip(*group, strict=True))
                results += client.generate(prompts, own, progress=True)
                params += own
            seconds = time.monotonic() - sent
            waves = [match.groupdict() for line in list(server.log_lines) if (match := WAVE.search(line))]
            differences = {number: _difference(client, results[number], params[number]) for number in ALONE}
    _draw(results, params).save(PICTURE)
    return _report(console, results, params, waves, differences, seconds, time.monotonic() - began)


def _difference(client: DiffusionClient, fused: GenerationResult, params: SamplingParams) -> int:
    """The largest difference of any pixel's colour value between the fused picture and the same request alone."""
    alone = client.generate(fused.prompt, params)[0].raise_for_error()
    assert alone.receipt is not None
    assert alone.receipt.wave_size == 1
    pixels = [np.asarray(image, dtype=np.int16) for image in (fused.images[0], alone.images[0])]
    return int(np.abs(pixels[0] - pixels[1]).max())


def _report(
    console: Console,
    results: list[GenerationResult],
    params: list[SamplingParams],
    waves: list[dict[str, Any]],
    differences: dict[int, int],
    seconds: float,
    total: float,
) -> int:
    table = Table(
        "wave", "requests", "rows", "key", "waited ms", "ran ms", title="Waves: requests in one forward pass"
    )
    for wave in waves:
        table.add_row(*wave.values())
    console.print(table)
    failed = [result for result in results if result.error is not None]
    selections = defaultdict(set)  # of LoRA adapters, in each wave
    for result, own in zip(results, params, strict=True):
        if result.receipt and own.lora is not None:
            selections[result.receipt.wave_id].add(own.lora)
    for wave_id, loras in selections.items():
        console.print(f"wave {wave_id}: {len(loras)} different LoRA selections in one forward pass")
    for result in failed:
        console.print(f"refused {result.prompt!r}: {result.error}", markup=False)
    for number, difference in differences.items():
        console.print(f"request {number}: fused and alone differ by at most {difference} of 255")
    console.print(f"{len(results) - len(failed)} pictures in {seconds:.2f} s, all in {total:.1f} s: {PICTURE.name}")
    FIGURES.parent.mkdir(exist_ok=True)
    figures = {
        "requests": len(results),
        "errors": [str(result.error) for result in failed],
        "waves": waves,
        "lora_selections_of_waves": {wave_id: sorted(loras) for wave_id, loras in selections.items()},
        "largest_difference_from_alone": differences,
        "seconds_for_all_requests": round(seconds, 3),
        "seconds_in_all": round(total, 3),
    }
    FIGURES.write_text(json.dumps(figures, indent=2) + "\n")
    as_expected = len(failed) == 1 and max(differences.values()) <= 1 and any(int(w["requests"]) > 1 for w in waves)
    return 0 if as_expected and any(len(loras) > 1 for loras in selections.values()) else 1


def _draw(results: list[GenerationResult], params: list[SamplingParams]) -> PIL.Image.Image:
    """A grid of all requests, each with its prompt and parameters below."""
    cell_width, cell_height, scale, columns = 300, 210, 2, 4
    grid = PIL.Image.new("RGB", (columns * cell_width, len(results) // columns * cell_height), "white")
    draw, font = PIL.ImageDraw.Draw(grid), PIL.ImageFont.load_default(13)
    for number, (result, own) in enumerate(zip(results, params, strict=True)):
        left, top = number % columns * cell_width + 10, number // columns * cell_height + 10
        if result.error is None:
            image = result.images[0]
            grid.paste(
                image.resize((image.width * scale, image.height * scale), PIL.Image.Resampling.NEAREST), (left, top)
            )
        else:
            draw.rectangle((left, top, left + 128, top + 128), outline="red")
            draw.text((left + 34, top + 56), "refused", fill="red", font=font)
        draw.text((left, top + 134), _label(result, own), fill="black", font=font)
    return grid


def _label(result: GenerationResult, own: SamplingParams) -> str:
    """The prompt, and what sets the request apart."""
    words = result.prompt.replace(" on ", "\non ")
    if result.receipt is None:
        return f"{words}\nheight {own.height}"
    if own.lora is None:
        words += f"\nseed {own.seed}, {own.num_inference_steps} steps, guidance {own.guidance_scale}"
    else:
        words += f"\nseed {own.seed}, {f'LoRA {own.lora}' if own.lora else 'no LoRA'}"
    return f"{words}, wave {result.receipt.wave_id}"


if __name__ == "__main__":
    sys.exit(main())
