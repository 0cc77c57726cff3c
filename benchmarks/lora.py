"""Eight requests with eight different LoRA adapters: in one mixed wave, in a wave each, and without adapters.

All in one process, by turns, on one pipeline each; ratios count, times do not: they are of the machine that runs this.
Also measured: peft's own way to give each row its adapter, `adapter_names`, which has one scale for an adapter and
finds the rows of each adapter anew in every layer. Exits with 1 if a ratio is not what it should be.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from peft.tuners.lora import Linear
from rich.console import Console
from rich.table import Table

from tests.tiny_loras import ATTENTION, FEED_FORWARD, write_lora
from tests.tiny_pipelines import flux, stable_diffusion_3
from triton_diffusion.adapters.loading import adapter_for
from triton_diffusion.batch import DiffusionRequestBatch
from triton_diffusion.config import EngineConfig
from triton_diffusion.lora import Loras
from triton_diffusion.lora.files import find_loras
from triton_diffusion.lora.loading import load_loras
from triton_diffusion.request import OmniDiffusionRequest
from triton_diffusion.sampling_params import SamplingParams

FIGURES = Path(__file__).resolve().parents[1] / "build" / "lora.json"
ROWS = 8
STEPS = 20
ROUNDS = 7

MOST_TIME = 1.6

LORAS = [f"adapter-{number}" for number in range(ROWS)]
"""Of ranks 4 and 8, for the attention, and for attention and feed-forward layers."""


class Model(NamedTuple):
    """A tiny model, and the throughput that mixing is to bring: none where fusing itself brings little on a CPU."""

    build: Callable[[], Any]
    throughput: float


MODELS = {
    "tiny Flux (16 image and 16 text tokens)": Model(flux, 3.0),
    "tiny Stable Diffusion 3 (16 image and 93 text tokens)": Model(stable_diffusion_3, 0.0),
}


def main() -> int:
    console = Console(highlight=False)
    torch.set_num_threads(1)
    records = [measure(name, model, console) for name, model in MODELS.items()]
    FIGURES.parent.mkdir(exist_ok=True)
    FIGURES.write_text(json.dumps(records, indent=2) + "\n")
    return 0 if all(record["is_kept"] for record in records) else 1


def measure(name: str, model: Model, console: Console) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder, console.status(f"{name}: writing adapters"):
        directory = Path(folder)
        for number, lora in enumerate(LORAS):
            targets = (*ATTENTION, *FEED_FORWARD) if number % 2 else ATTENTION
            write_lora(model.build(), directory / lora, rank=4 + number // 4 * 4, seed=number, targets=targets)
        untouched = adapter_of(model, None)
        mixed = adapter_of(model, directory, lora_mixed=True)
        separate = adapter_of(model, directory)
        peft = adapter_of(model, directory)
        peft.loras = PeftMixedLoras(peft)
    ways: dict[str, Callable[[], None]] = {
        "no adapters loaded": lambda: run(untouched, [requests_of(untouched, None)]),
        "base wave": lambda: run(mixed, [requests_of(mixed, None)]),
        "mixed wave": lambda: run(mixed, [requests_of(mixed, LORAS)]),
        "mixed wave by peft's adapter_names": lambda: run(peft, [requests_of(mixed, LORAS)]),
        "a wave for each adapter": lambda: run(separate, [[request] for request in requests_of(mixed, LORAS)]),
        "without adapters, a wave for each request": lambda: run(mixed, [[each] for each in requests_of(mixed, None)]),
    }
    seconds = by_turns(ways)
    throughput = seconds["a wave for each adapter"] / seconds["mixed wave"]
    time_ratio = seconds["mixed wave"] / seconds["base wave"]

    table = Table(f"{name}, {ROWS} requests, {STEPS} steps", "milliseconds", "of the base wave")
    for way, value in seconds.items():
        table.add_row(way, f"{value * 1000:.0f}", f"x {value / seconds['base wave']:.2f}")
    console.print(table)
    wanted = f" (at least {model.throughput:g})" if model.throughput else ""
    console.print(f"throughput of the mixed wave: {throughput:.2f} times that of a wave for each adapter{wanted}")
    console.print(f"time of the mixed wave: {time_ratio:.2f} times that of the base wave (at most {MOST_TIME:g})\n")
    return {
        "model": name,
        "seconds": seconds,
        "throughput_mixed_to_separate": throughput,
        "time_mixed_to_base": time_ratio,
        "is_kept": throughput >= model.throughput and time_ratio <= MOST_TIME,
    }


def by_turns(ways: dict[str, Callable[[], None]]) -> dict[str, float]:
    """The median seconds of each way; in every round each has its turn, after one that is not counted."""
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    for number in range(ROUNDS + 1):
        for way, call in ways.items():
            began = time.perf_counter()
            call()
            if number:
                seconds[way].append(time.perf_counter() - began)
    return {way: statistics.median(values) for way, values in seconds.items()}


def adapter_of(model: Model, directory: Path | None, **config: Any) -> Any:
    adapter = adapter_for(model.build(), EngineConfig(model="tiny", max_num_seqs=ROWS, **config))
    if directory is not None:
        adapter.loras = load_loras(adapter.pipeline, find_loras(str(directory), {}, Path()), adapter.config)
    return adapter


def requests_of(adapter: Any, loras: Sequence[str] | None) -> list[OmniDiffusionRequest]:
    """Requests of one size, each with a prompt, a seed and an adapter of its own."""
    given = {"height": 16, "width": 16, "max_sequence_length": 16, "num_inference_steps": STEPS}
    return [
        OmniDiffusionRequest(
            prompt=f"{number} cats",
            request_id=str(number),
            sampling_params=SamplingParams(
                **given,  # type: ignore[arg-type]
                seed=number,
                lora=None if loras is None else loras[number],
            ).with_defaults(adapter.defaults),
        )
        for number in range(ROWS)
    ]


@torch.inference_mode()
def run(adapter: Any, waves: list[list[OmniDiffusionRequest]]) -> None:
    for wave in waves:
        adapter.forward(DiffusionRequestBatch(wave))


class PeftMixedLoras(Loras):
    """Each row's adapter by peft's `adapter_names`, as the documentation of peft shows it."""

    is_mixed = True

    def __init__(self, adapter: Any) -> None:
        super().__init__(adapter.loras.names)
        names = {name: f"lora_{number}" for number, name in enumerate(adapter.loras.names)}
        adapter.pipeline.enable_lora()
        self._rows: list[str] = []
        self._own = names
        for module in adapter.pipeline.transformer.modules():
            if isinstance(module, Linear):
                module.register_forward_pre_hook(self._with_names, with_kwargs=True)

    def before_pass(self, rows: Sequence[Any]) -> None:
        self._rows = [self._own[selection.names[0]] for selection in rows]

    def _with_names(self, module: Any, arguments: Any, named: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return arguments, {**named, "adapter_names": self._rows}


if __name__ == "__main__":
    sys.exit(main())
