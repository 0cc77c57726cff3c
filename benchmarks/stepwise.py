"""Step-wise continuous batching against request-level batching, side by side on one real server.

Ratios count, times do not: they are of the machine that runs this. Exits with 1 if a ratio is not what it should be.
"""

from __future__ import annotations

import json
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from tests.server.repository import add_model
from tests.tiny_pipelines import stable_diffusion_3
from triton_diffusion.adapters import StableDiffusion3Adapter
from triton_diffusion.config import EngineConfig
from triton_diffusion.embedded import TritonServer
from triton_diffusion.errors import TritonDiffusionError
from triton_diffusion.output import DiffusionOutput
from triton_diffusion.receipt import Receipt
from triton_diffusion.reply import Reply
from triton_diffusion.request import OmniDiffusionRequest, unique_request_id
from triton_diffusion.sampling_params import SamplingParams
from triton_diffusion.serving import build_engine
from triton_diffusion_client import DiffusionClient

ROOT = Path(__file__).resolve().parents[1]
FIGURES = ROOT / "build" / "stepwise.json"
MODES = ("request", "step")
SECONDS = 6.0
ROUNDS = 3
SIZES = {
    "tiny": [SamplingParams(height=size, width=16, max_sequence_length=16) for size in (16, 20, 24, 28)],
    "shapes": [SamplingParams(height=64, width=size, max_sequence_length=16) for size in (64, 72, 80, 88)],
}
"""Sizes of each model, near each other: each is a key of its own."""


@dataclass
class Figure:
    """A measured ratio, and the bound that it should keep."""

    what: str
    measured: float
    bound: float
    at_least: bool = True

    @property
    def is_kept(self) -> bool:
        return self.measured >= self.bound if self.at_least else self.measured <= self.bound


def main() -> int:
    console = Console(highlight=False)
    figures: list[Figure] = []
    with tempfile.TemporaryDirectory() as folder:
        repository = build_repository(Path(folder))
        with console.status("starting Triton"), TritonServer(repository) as server:
            for model in SIZES:
                console.print(f"{model}: equal requests of 8 clients")
                figures.append(equal_requests(server, model))
                console.print(f"{model}: short requests beside a long one")
                figures.append(short_beside_long(server, model))
            console.print("tiny: several keys of 24 clients")
            figures += several_keys(server, "tiny")
    figures += [overhead(rows, bound) for rows, bound in ((1, 0.3), (8, 0.8), (32, 3.0))]
    table = Table("what", "measured", "should be", "")
    for figure in figures:
        bound = f"{'at least' if figure.at_least else 'at most'} {figure.bound:g}"
        table.add_row(figure.what, f"{figure.measured:.2f}", bound, "" if figure.is_kept else "[red]missed[/red]")
    console.print(table)
    FIGURES.parent.mkdir(exist_ok=True)
    FIGURES.write_text(
        json.dumps([{**vars(figure), "is_kept": figure.is_kept} for figure in figures], indent=2) + "\n"
    )
    return 0 if all(figure.is_kept for figure in figures) else 1


def build_repository(folder: Path) -> Path:
    """Both models in both modes; an engine that is not used costs nothing."""
    repository = folder / "repository"
    stable_diffusion_3().save_pretrained(folder / "tiny")
    shutil.copytree(ROOT / "model_repository" / "shapes" / "1" / "checkpoint", folder / "shapes")
    for model in SIZES:
        for mode in MODES:
            wait = {"max_wait_ms": 5 if mode == "request" else 0}
            step_execution = "true" if mode == "step" else "false"
            add_model(repository, f"{model}_{mode}", folder / model, step_execution=step_execution, **wait)  # type: ignore[arg-type]
    return repository


def throughput(server: TritonServer, model: str, clients: int, params: Callable[[int, int], SamplingParams]) -> float:
    """Requests a second of clients that each send their next request when they have their last answer."""
    stop = time.monotonic() + SECONDS
    done: list[int] = []

    def client(number: int) -> None:
        count = 0
        with DiffusionClient(server.grpc_url, model) as connection:
            while time.monotonic() < stop:
                connection.generate(f"a red circle, number {number}-{count}", params(number, count))[
                    0
                ].raise_for_error()
                count += 1
        done.append(count)

    began = time.monotonic()
    in_parallel(client, clients)
    return sum(done) / (time.monotonic() - began)


def in_parallel(work: Callable[[int], None], count: int) -> None:
    threads = [threading.Thread(target=work, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def equal_requests(server: TritonServer, model: str) -> Figure:
    """(a) Where request-level batching is at its best, the step-wise mode loses little."""

    def params(client: int, count: int) -> SamplingParams:
        return replace(
            SIZES[model][0], seed=client + count, num_inference_steps=28
        )  # StableDiffusion3Pipeline's default

    ratios = []
    for _ in range(ROUNDS):
        rates = {mode: throughput(server, f"{model}_{mode}", 8, params) for mode in MODES}
        ratios.append(rates["step"] / rates["request"])
    return Figure(f"{model}: throughput of equal requests, step / request", statistics.median(ratios), 0.95)


def short_beside_long(server: TritonServer, model: str) -> Figure:
    """(b) A short request does not wait for the end of a long one."""
    medians = {}
    for mode in MODES:
        latencies: list[float] = []
        stop = threading.Event()
        with DiffusionClient(server.grpc_url, f"{model}_{mode}") as connection:

            def long(connection: DiffusionClient = connection, stop: threading.Event = stop) -> None:
                while not stop.is_set():
                    connection.generate("a cat", replace(SIZES[model][0], num_inference_steps=60))

            running = threading.Thread(target=long)
            running.start()
            for number in range(12):
                time.sleep(0.05)
                began = time.monotonic()
                short = replace(SIZES[model][0], seed=number, num_inference_steps=6)
                connection.generate("a dog", short)[0].raise_for_error()
                latencies.append(time.monotonic() - began)
            stop.set()
            running.join()
        medians[mode] = statistics.median(latencies)
    return Figure(f"{model}: latency of short beside long, request / step", medians["request"] / medians["step"], 3)


def several_keys(server: TritonServer, model: str) -> list[Figure]:
    """(c) Several keys share the steps, and fused passes stay full."""
    rates: dict[int, list[float]] = {1: [], 2: [], 4: []}
    for _ in range(ROUNDS):
        for keys, measured in rates.items():

            def params(client: int, count: int, keys: int = keys) -> SamplingParams:
                return replace(SIZES[model][client % keys], seed=client + count, num_inference_steps=20)

            measured.append(throughput(server, f"{model}_step", 24, params))
    one = statistics.median(rates[1])
    return [
        Figure(f"{model}: throughput of {keys} keys / 1 key, 24 clients", statistics.median(rates[keys]) / one, 0.8)
        for keys in (2, 4)
    ]


class NoReply(Reply):
    """Answers nobody."""

    def send_output(self, output: DiffusionOutput, receipt: Receipt) -> None:
        pass

    def send_error(self, error: TritonDiffusionError) -> None:
        pass


def overhead(rows: int, bound: float) -> Figure:
    """(d) Milliseconds of a step that are not spent in the transformer's forward pass."""
    pipeline = stable_diffusion_3()
    config = EngineConfig(model="tiny", max_num_seqs=rows, step_execution=True)
    forward_seconds = 0.0
    stock_forward = pipeline.transformer.forward

    def timed(**arguments: Any) -> Any:
        nonlocal forward_seconds
        began = time.perf_counter()
        result = stock_forward(**arguments)
        forward_seconds += time.perf_counter() - began
        return result

    pipeline.transformer.forward = timed
    engine = build_engine(StableDiffusion3Adapter(pipeline, config), config)
    params = replace(SIZES["tiny"][0], seed=0, num_inference_steps=200, guidance_scale=5.0)
    params = params.with_defaults(SamplingParams(num_images_per_prompt=1))
    engine.add_requests(
        [
            (OmniDiffusionRequest(prompt="a cat", request_id=unique_request_id(), sampling_params=params), NoReply())
            for _ in range(rows)
        ]
    )
    engine.step()  # encodes
    overheads = []
    for _ in range(150):
        forward_seconds = 0.0
        began = time.perf_counter()
        engine.step()
        overheads.append(time.perf_counter() - began - forward_seconds)
    engine.shutdown()
    milliseconds = statistics.median(overheads) * 1000
    return Figure(f"engine: ms a step outside of the forward pass, {rows} rows", milliseconds, bound, at_least=False)


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main())
