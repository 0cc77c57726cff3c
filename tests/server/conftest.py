"""A real tritonserver with tiny pipelines, started once for all tests that do not stop it."""

from __future__ import annotations

import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pytest
import tritonclient.grpc
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from tests.server.repository import FAULTY_MODEL, add_model
from tests.tiny_pipelines import pixart_alpha, stable_diffusion_3
from triton_diffusion.embedded import TritonServer
from triton_diffusion_client import DiffusionClient

TINY_DEFAULTS = {"height": 32, "width": 32, "num_inference_steps": 6, "max_sequence_length": 32}

PATIENCE = 120.0
"""Seconds that a test waits for what must come; a loaded machine may be slow, so this only bounds a hang."""


@pytest.fixture(scope="session")
def stable_diffusion() -> Any:
    """The pipeline that is served, to compare with."""
    return stable_diffusion_3()


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory, stable_diffusion: Any) -> Path:
    path = tmp_path_factory.mktemp("checkpoint") / "stable_diffusion_3"
    stable_diffusion.save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory, checkpoint: Path) -> Iterator[TritonServer]:
    repository = tmp_path_factory.mktemp("repository")
    add_model(repository, "tiny", checkpoint, default_sampling_params=TINY_DEFAULTS)
    add_model(
        repository,
        "one_at_a_time",
        checkpoint,
        max_batch_size=1,
        max_wait_ms=0,
        max_queue_size=2,
        default_sampling_params=TINY_DEFAULTS,
    )
    add_model(repository, "faulty", checkpoint, model=FAULTY_MODEL, default_sampling_params=TINY_DEFAULTS)
    add_model(
        repository,
        "stepwise",
        checkpoint,
        max_wait_ms=0,
        step_execution="true",
        batch_invariant="true",
        default_sampling_params=TINY_DEFAULTS,
    )
    pixart_checkpoint = tmp_path_factory.mktemp("pixart")
    pixart_alpha().save_pretrained(pixart_checkpoint)
    add_model(repository, "pixart", pixart_checkpoint, max_batch_size=4, max_wait_ms=0)
    with TritonServer(repository) as server:
        yield server


@pytest.fixture(params=["grpc", "http"])
def client(server: TritonServer, request: pytest.FixtureRequest) -> Iterator[DiffusionClient]:
    """A client of the model `tiny`, by each protocol."""
    url = server.grpc_url if request.param == "grpc" else server.http_url
    with DiffusionClient(f"{request.param}://{url}", model="tiny") as client:
        yield client


def wait_until(condition: Callable[[], bool], what: str, timeout: float = PATIENCE) -> None:
    """Until `condition` holds."""
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, f"waited {timeout:.0f} s in vain: {what}"
        time.sleep(0.02)


def wait_for_log(server: TritonServer, text: str, since: int = 0, timeout: float = PATIENCE) -> str:
    """The first log line after position `since` that holds `text`."""
    found: list[str] = []

    def is_there() -> bool:
        found.extend(line for line in server.log_lines[since:] if text in line)
        return bool(found)

    wait_until(is_there, f"a log line with {text!r}", timeout)
    return found[0]


class Measured(Protocol):
    """A server whose metrics can be read."""

    @property
    def metrics_url(self) -> str: ...


def samples(server: Measured) -> list[Sample]:
    """All that the metrics endpoint says, as Prometheus reads it."""
    with urllib.request.urlopen(f"http://{server.metrics_url}/metrics") as response:
        families = text_string_to_metric_families(response.read().decode())
    return [sample for family in families for sample in family.samples]


def metric(server: Measured, model: str, name: str, **labels: str) -> float:
    """One of a model's metrics, summed over the labels that are not given; 0 before it is first set."""
    wanted = {"model": model, **labels}.items()
    return sum(sample.value for sample in samples(server) if sample.name == name and wanted <= sample.labels.items())


def wait_for_running(server: Measured, model: str, requests: int, timeout: float = PATIENCE) -> None:
    """Until so many requests of the model take steps."""
    name = "triton_diffusion_running_requests"
    wait_until(lambda: metric(server, model, name) == requests, f"{requests} running requests of {model}", timeout)


def wait_for_waiting(server: Measured, model: str, requests: int) -> None:
    """Until so many requests wait in the model's engine."""
    name = "triton_diffusion_waiting_requests"
    wait_until(lambda: metric(server, model, name) == requests, f"{requests} waiting requests of {model}")


def wait_until_idle(server: Measured, model: str) -> None:
    """Until the model's engine has nothing to do."""
    names = ("triton_diffusion_live_states", "triton_diffusion_waiting_requests")
    wait_until(lambda: not any(metric(server, model, name) for name in names), f"{model} is idle")


@contextmanager
def occupied(server: TritonServer, model: str) -> Iterator[None]:
    """Meanwhile the model is busy with one long request, so that all others wait; afterwards they run together.

    Without it, a wave may begin before the last of its requests has arrived.
    """
    wait_until_idle(server, model)
    prompt = tritonclient.grpc.InferInput("prompt", [1, 1], "BYTES")
    prompt.set_data_from_numpy(np.array([["a long wait"]], object))
    long = {"num_inference_steps": 1000, "num_images_per_prompt": 8}
    with tritonclient.grpc.InferenceServerClient(server.grpc_url) as connection:
        under_way = connection.async_infer(model, [prompt], lambda **_: None, parameters=long)
        try:
            wait_for_running(server, model, 1)
            yield
        finally:
            under_way.cancel()
