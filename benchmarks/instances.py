"""Two model instances against one, on one real server: throughput, wave sizes, and what each instance did.

Each instance is an engine with its own copy of the pipeline, as `--instances` and `--gpus` make them; here on the CPU,
one thread each. Exits with 1 if an instance stayed idle. Times are of the machine that runs this.
"""

from __future__ import annotations

import json
import os
import re
import statistics
import sys
import tempfile
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from tests.tiny_pipelines import stable_diffusion_3
from triton_diffusion.deployment import plan_models, write_repository
from triton_diffusion.embedded import TritonServer
from triton_diffusion.receipt import Receipt
from triton_diffusion_client import DiffusionClient, SamplingParams

FIGURES = Path(__file__).resolve().parents[1] / "build" / "instances.json"
CLIENTS = 32
SECONDS = 15.0
KEYS = [SamplingParams(height=size, width=32, max_sequence_length=32, num_inference_steps=8) for size in (32, 48)]
COMPLETED = re.compile(
    r'^triton_diffusion_requests_total{[^}]*instance="(\w+)"[^}]*outcome="completed"[^}]*} (\S+)$', re.MULTILINE
)


def main() -> int:
    os.environ["OMP_NUM_THREADS"] = "1"
    records = []
    with tempfile.TemporaryDirectory() as scratch:
        checkpoint = Path(scratch) / "tiny"
        stable_diffusion_3().save_pretrained(checkpoint)
        for instances in (1, 2):
            repository = Path(scratch) / f"repository_{instances}"
            options = {
                "max_num_seqs": 8,
                "request_batch_max_wait_ms": 5,
                "device": "cpu",
                "instances": instances,
            }
            write_repository(repository, plan_models(str(checkpoint), [], None, options, print))
            with TritonServer(repository) as server:
                records.append({"instances": instances, **measured(server)})
    show(records)
    FIGURES.parent.mkdir(exist_ok=True)
    FIGURES.write_text(json.dumps(records, indent=2) + "\n")
    return 0 if all(min(record["requests_of_each_instance"].values()) > 0 for record in records) else 1


def measured(server: TritonServer) -> dict[str, Any]:
    """What many clients of two keys see, each of whom sends its next request when it has the last one's answer."""
    end = time.monotonic() + SECONDS

    def one_client(number: int) -> list[Receipt]:
        receipts: list[Receipt] = []
        with DiffusionClient(server.grpc_url, "tiny") as client:
            while time.monotonic() < end:
                (result,) = client.generate("a cat", KEYS[number % 2])
                receipt = result.raise_for_error().receipt
                assert receipt is not None
                receipts.append(receipt)
        return receipts

    began = time.monotonic()
    with ThreadPoolExecutor(CLIENTS) as clients:
        receipts = [receipt for receipts in clients.map(one_client, range(CLIENTS)) for receipt in receipts]
    seconds = time.monotonic() - began
    return {
        "requests_per_second": len(receipts) / seconds,
        "mean_wave_size_of_a_request": statistics.mean(receipt.wave_size for receipt in receipts),
        "median_queue_ms": statistics.median(receipt.queue_ms for receipt in receipts),
        "requests_of_each_instance": completed(server),
    }


def completed(server: TritonServer) -> dict[str, int]:
    with urllib.request.urlopen(f"http://{server.metrics_url}/metrics") as response:
        return {name: int(float(count)) for name, count in COMPLETED.findall(response.read().decode())}


def show(records: list[dict[str, Any]]) -> None:
    table = Table("instances", "requests/s", "wave size", "median queue ms", "requests of each instance")
    for record in records:
        each = ", ".join(f"{name}: {count}" for name, count in sorted(record["requests_of_each_instance"].items()))
        table.add_row(
            str(record["instances"]),
            f"{record['requests_per_second']:.0f}",
            f"{record['mean_wave_size_of_a_request']:.1f}",
            f"{record['median_queue_ms']:.0f}",
            each,
        )
    Console(width=120, highlight=False).print(table)


if __name__ == "__main__":
    sys.exit(main())
