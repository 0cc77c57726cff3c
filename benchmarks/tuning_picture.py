"""The curves of the tuning page."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # there may be no screen

from matplotlib.axes import Axes
from matplotlib.figure import Figure

Record = dict[str, Any]


def draw(records: list[Record], path: Path) -> None:
    """Write the curves of all experiments as one picture."""
    figure = Figure(figsize=(11, 6.2), layout="constrained")
    axes = figure.subplots(2, 3)
    sizes = [record for record in records if record["experiment"] == "max_num_seqs"]
    waits = [record for record in records if record["experiment"] == "wait"]
    modes = [record for record in records if record["experiment"] == "mode"]

    _curves(axes[0, 0], sizes, "max_num_seqs", lambda record: record["requests_per_second"])
    axes[0, 0].set(title="max_num_seqs: throughput", ylabel="requests / s", ylim=(0, None))
    _curves(axes[1, 0], sizes, "max_num_seqs", lambda record: record["p50_ms"])
    axes[1, 0].set(title="max_num_seqs: latency (median)", ylabel="ms")
    axes[1, 0].set_ylim(bottom=0)
    for axis in axes[:, 0]:
        axis.set_xscale("log", base=2)
        axis.set_xticks(list(dict.fromkeys(record["max_num_seqs"] for record in sizes)))
        axis.xaxis.set_major_formatter("{x:.0f}")

    _curves(axes[0, 1], waits, "wait_ms", lambda record: record["mean_wave_size"])
    axes[0, 1].set(title="wait: requests in a wave", ylabel="requests", ylim=(0, 9))
    _curves(axes[1, 1], waits, "wait_ms", lambda record: record["p50_ms"])
    axes[1, 1].set(title="wait: latency (median)", ylabel="ms")
    axes[1, 1].set_ylim(bottom=0)

    _bars(axes[0, 2], modes, {"requests / s": "requests_per_second"})
    axes[0, 2].set(title="mode: throughput", ylabel="requests / s")
    mixed = [record for record in modes if "long_p50_ms" in record]
    _bars(axes[1, 2], mixed, {"short, median": "p50_ms", "short, 99 of 100": "p99_ms", "long, median": "long_p50_ms"})
    axes[1, 2].set(title="mode: latency, two lengths", ylabel="ms")
    figure.savefig(path, dpi=90)


def _curves(axis: Axes, records: list[Record], x: str, y: Callable[[Record], float]) -> None:
    """A line for each load."""
    for load in dict.fromkeys(record["load"] for record in records):
        points = [record for record in records if record["load"] == load]
        axis.plot([point[x] for point in points], [y(point) for point in points], marker="o", label=load)
    axis.set_xlabel("max_num_seqs" if x == "max_num_seqs" else "request_batch_max_wait_ms")
    axis.grid(alpha=0.3)
    axis.legend(fontsize="small")


def _bars(axis: Axes, records: list[Record], values: dict[str, str]) -> None:
    """Both modes side by side, for each load and each of the values."""
    modes = {"request-level": False, "step-wise": True}

    def groups() -> Iterator[tuple[str, list[float]]]:
        for load in dict.fromkeys(record["load"] for record in records):
            for label, value in values.items():
                by_mode = {record["step_execution"]: record[value] for record in records if record["load"] == load}
                yield (
                    load.replace(", ", "\n") if len(values) == 1 else label.replace(", ", "\n"),
                    [by_mode[is_step] for is_step in modes.values()],
                )

    labels, heights = zip(*groups(), strict=True)
    for number, mode in enumerate(modes):
        places = [place + 0.4 * number for place in range(len(labels))]
        axis.bar(places, [group[number] for group in heights], width=0.38, label=mode)
    axis.margins(y=0.25)  # room for the legend
    axis.set_xticks([place + 0.2 for place in range(len(labels))], labels, fontsize="small")
    axis.legend(fontsize="small")
