"""How far every family's fused results are from the stock call of each request alone, and what batch_invariant costs.

Each cell is the largest difference of the final latents (in units of their spread, where that is above 1) over a wave
of N requests that differ in prompt, negative prompt, seed, steps, guidance and number of images. Exits with 1 if a
bound is not kept: bit for bit for one request alone, 1e-5 in float32, 0.05 in bfloat16.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from tests.engine.staggered import ARRIVALS, TOGETHER, difference, run_staggered
from tests.families import FAMILIES, Family
from triton_diffusion.batch import DiffusionRequestBatch
from triton_diffusion.request import OmniDiffusionRequest

FIGURES = Path(__file__).resolve().parents[1] / "build" / "families.json"
BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 0.05}
SIZES = (1, 2, 4, 8)


def main() -> int:
    console = Console(width=120, highlight=False)
    table = Table("family", "dtype", "mode", *(f"N={size}" for size in SIZES), "batch_invariant")
    records = []
    for family in track(FAMILIES, "comparing", console=Console(stderr=True)):
        for dtype, bound in BOUNDS.items():
            pipeline = family.build(dtype=dtype)
            cost = batch_invariant_cost(family, pipeline)
            for mode in ("request", "staggered"):
                found = {size: largest_difference(family, pipeline, mode, size) for size in SIZES}
                kept = {size: value <= (0 if size == 1 else bound) for size, value in found.items()}
                cells = [f"{value:.1e}" if kept[size] else f"[red]{value:.1e}[/red]" for size, value in found.items()]
                name = str(dtype).removeprefix("torch.")
                table.add_row(family.name, name, mode, *cells, f"x {cost:.2f}" if mode == "request" else "")
                records.append(
                    {
                        "family": family.name,
                        "dtype": name,
                        "mode": mode,
                        "largest_difference": found,
                        "is_kept": all(kept.values()),
                        "batch_invariant_cost": cost,
                    }
                )
    console.print(table)
    FIGURES.parent.mkdir(exist_ok=True)
    FIGURES.write_text(json.dumps(records, indent=2) + "\n")
    return 0 if all(record["is_kept"] for record in records) else 1


def largest_difference(family: Family, pipeline: Any, mode: str, size: int) -> float:
    adapter = family.adapter(pipeline, step_execution=mode == "staggered")
    requests = requests_of(family, adapter, size)
    run_staggered(adapter, requests, ARRIVALS if mode == "staggered" else TOGETHER)
    return max(
        difference(adapter.latents[request.request_id], family.stock_call(pipeline, request, "latent"))
        for request in requests
    )


def requests_of(family: Family, adapter: Any, size: int) -> list[OmniDiffusionRequest]:
    # A request of several images is a wave of its own, so a request alone has one.
    return family.requests(adapter, size, **({"num_images_per_prompt": 1} if size == 1 else {}))


def batch_invariant_cost(family: Family, pipeline: Any) -> float:
    """The time of a wave of two with batch_invariant, for max_num_seqs 8, over the time without it."""
    ratios = []
    for _ in range(3):
        seconds = []
        for batch_invariant in (False, True):
            adapter = family.adapter(pipeline, batch_invariant=batch_invariant)
            batch = DiffusionRequestBatch(family.requests(adapter, 2, num_images_per_prompt=1))
            began = time.perf_counter()
            adapter.forward(batch)
            seconds.append(time.perf_counter() - began)
        ratios.append(seconds[1] / seconds[0])
    return statistics.median(ratios)


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main())
