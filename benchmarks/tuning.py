"""What max_num_seqs, the wait and the mode do to throughput and latency: one real server, a tiny Flux, many clients.

Ratios count, times do not: they are of the machine that runs this. Writes build/tuning.json and docs/tuning.png.
"""

from __future__ import annotations

import asyncio
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from benchmarks.tuning_picture import draw
from tests.server.repository import add_model
from tests.tiny_pipelines import flux
from triton_diffusion.embedded import TritonServer
from triton_diffusion_client import SamplingParams
from triton_diffusion_client.async_client import AsyncDiffusionClient

ROOT = Path(__file__).resolve().parents[1]
FIGURES = ROOT / "build" / "tuning.json"
PICTURE = ROOT / "docs" / "tuning.png"

SIZES = (1, 2, 4, 8, 16)
CLIENTS = (1, 4, 16)
WAITS_MS = (0, 5, 20, 100)
USUAL_SIZE, USUAL_WAIT_MS = 8, 5
STEPS = 8
SECONDS = 1.5
ROUNDS = 4
"""Every load comes so often, by turns, so that a busy moment of the machine does not hit one setting alone."""

SHORT, LONG = 5, 40
"""Denoising steps where requests have different lengths."""


class Setting(NamedTuple):
    """How a model is served."""

    max_num_seqs: int = USUAL_SIZE
    wait_ms: int = USUAL_WAIT_MS
    step_execution: bool = False

    @property
    def model(self) -> str:
        """The name of the model that is served so."""
        return f"{'step' if self.step_execution else 'request'}_{self.max_num_seqs}_{self.wait_ms}"


class Answer(NamedTuple):
    """One answer: when it came, how long it took, the requests of its wave and its own steps."""

    at: float
    seconds: float
    wave_size: int
    steps: int


Load = Callable[[AsyncDiffusionClient, float], Awaitable[list[Answer]]]
"""Sends requests for so many seconds."""


def clients(count: int, steps: Callable[[int], int]) -> Load:
    """So many clients, each of whom sends its next request when it has its last answer."""

    async def load(connection: AsyncDiffusionClient, seconds: float) -> list[Answer]:
        end = time.monotonic() + seconds
        answers: list[Answer] = []

        async def client(number: int) -> None:
            while time.monotonic() < end:
                answers.append(await ask(connection, number, steps(number)))

        await asyncio.gather(*map(client, range(count)))
        return [answer for answer in answers if answer.at <= end]

    return load


async def bursts(connection: AsyncDiffusionClient, seconds: float) -> list[Answer]:
    """Four requests, four milliseconds apart; the next four when all of them are answered, and a pause."""
    end = time.monotonic() + seconds
    answers: list[Answer] = []
    while time.monotonic() < end:
        asked = []
        for number in range(4):
            asked.append(asyncio.create_task(ask(connection, number, STEPS)))
            await asyncio.sleep(0.004)
        answers += await asyncio.gather(*asked)
        await asyncio.sleep(0.05)
    return answers


def equal(client: int) -> int:  # noqa: ARG001
    """Every client's requests are as long as the others'."""
    return STEPS


def of_two_lengths(client: int) -> int:
    """Every third client's requests are long."""
    return LONG if client % 3 == 0 else SHORT


async def ask(connection: AsyncDiffusionClient, number: int, steps: int) -> Answer:
    began = time.monotonic()
    params = SamplingParams(height=16, width=16, max_sequence_length=16, num_inference_steps=steps, seed=number)
    (result,) = await connection.generate(f"a red circle, number {number}", params)
    receipt = result.raise_for_error().receipt
    assert receipt is not None
    ended = time.monotonic()
    return Answer(ended, ended - began, receipt.wave_size, steps)


class Experiment(NamedTuple):
    """One of the questions: its settings, each under each of its loads."""

    name: str
    settings: list[Setting]
    loads: dict[str, Load]


EXPERIMENTS = [
    Experiment(
        "max_num_seqs",
        [Setting(max_num_seqs=size) for size in SIZES],
        {f"{count} client{'s' * (count > 1)}": clients(count, equal) for count in CLIENTS},
    ),
    Experiment(
        "wait",
        [Setting(wait_ms=wait) for wait in WAITS_MS],
        {"1 client": clients(1, equal), "bursts of 4": bursts, "16 clients": clients(16, equal)},
    ),
    Experiment(
        "mode",
        [Setting(), Setting(wait_ms=0, step_execution=True)],
        {"12 clients, equal": clients(12, equal), "12 clients, two lengths": clients(12, of_two_lengths)},
    ),
]


def main() -> int:
    os.environ["OMP_NUM_THREADS"] = "1"
    console = Console(width=120, highlight=False)
    records: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as scratch:
        repository = build_repository(Path(scratch))
        with console.status("starting Triton"):
            server = TritonServer(repository)
            server.start()
        try:
            server.wait_until_ready()
            for experiment in EXPERIMENTS:
                console.print(f"measuring {experiment.name}")
                records += asyncio.run(measured(server, experiment))
        finally:
            server.stop()
    for experiment in EXPERIMENTS:
        console.print(table_of(experiment.name, records))
    machine = f"{os.cpu_count()} cores, {platform.machine()}"
    FIGURES.parent.mkdir(exist_ok=True)
    FIGURES.write_text(json.dumps({"machine": machine, "records": records}, indent=2) + "\n")
    draw(records, PICTURE)
    return 0


def build_repository(folder: Path) -> Path:
    """A model for each setting, all of one checkpoint; an engine that is not used costs nothing."""
    checkpoint, repository = folder / "flux", folder / "repository"
    flux().save_pretrained(checkpoint)
    for setting in {setting for experiment in EXPERIMENTS for setting in experiment.settings}:
        add_model(
            repository,
            setting.model,
            checkpoint,
            max_batch_size=setting.max_num_seqs,
            max_wait_ms=setting.wait_ms,
            step_execution=json.dumps(setting.step_execution),
            default_sampling_params={"height": 16, "width": 16, "max_sequence_length": 16},
        )
    return repository


async def measured(server: TritonServer, experiment: Experiment) -> Iterable[dict[str, Any]]:
    """A record for each setting under each load."""
    answers: dict[tuple[Setting, str], list[Answer]] = {}
    rates: dict[tuple[Setting, str], list[float]] = {}
    for _ in range(ROUNDS):
        for load_name, load in experiment.loads.items():
            for setting in experiment.settings:
                # Pictures of 16 pixels gain nothing from shared memory.
                async with AsyncDiffusionClient(server.grpc_url, setting.model, shared_memory=False) as connection:
                    began = time.monotonic()
                    got = await load(connection, SECONDS)
                    answers.setdefault((setting, load_name), []).extend(got)
                    rate = len(got) / (max(answer.at for answer in got) - began)
                    rates.setdefault((setting, load_name), []).append(rate)
    return [
        {
            "experiment": experiment.name,
            "load": load_name,
            **setting._asdict(),
            "answers": len(got),
            "requests_per_second": statistics.median(rates[setting, load_name]),
            "mean_wave_size": statistics.mean(answer.wave_size for answer in got),
            **{f"{name}_ms": 1000 * seconds for name, seconds in latencies(got).items()},
        }
        for (setting, load_name), got in answers.items()
    ]


def latencies(answers: list[Answer]) -> dict[str, float]:
    """Seconds that half, and 99 of 100, of the requests took at most; the short ones, where there are long ones."""
    shortest = min(answer.steps for answer in answers)
    seconds = sorted(answer.seconds for answer in answers if answer.steps == shortest)
    latency = {"p50": statistics.median(seconds), "p99": seconds[min(len(seconds) - 1, round(0.99 * len(seconds)))]}
    others = [answer.seconds for answer in answers if answer.steps != shortest]
    return {**latency, "long_p50": statistics.median(others)} if others else latency


def table_of(experiment: str, records: list[dict[str, Any]]) -> Table:
    columns = ("load", "mode", "max_num_seqs", "wait ms", "requests/s", "p50 ms", "p99 ms", "long p50 ms", "wave")
    table = Table(*columns, title=experiment)
    for record in records:
        if record["experiment"] == experiment:
            table.add_row(
                record["load"],
                "step" if record["step_execution"] else "request",
                str(record["max_num_seqs"]),
                str(record["wait_ms"]),
                f"{record['requests_per_second']:.1f}",
                f"{record['p50_ms']:.0f}",
                f"{record['p99_ms']:.0f}",
                f"{record['long_p50_ms']:.0f}" if "long_p50_ms" in record else "",
                f"{record['mean_wave_size']:.1f}",
            )
    return table


if __name__ == "__main__":
    sys.exit(main())
