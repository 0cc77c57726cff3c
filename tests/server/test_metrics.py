"""The metrics say what was really sent."""

from __future__ import annotations

import asyncio
import urllib.request
from pathlib import Path

import numpy as np
import psutil
import pytest
import tritonclient.grpc
from prometheus_client.parser import text_string_to_metric_families

from tests.server.conftest import metric, samples, wait_for_running, wait_until
from triton_diffusion.embedded import TritonServer
from triton_diffusion.metric import METRICS, MOST_KEYS, PREFIX
from triton_diffusion_client import AsyncDiffusionClient, DiffusionClient, SamplingParams


class Since:
    """What has been counted of a model since this was made, when the engine was idle."""

    def __init__(self, server: TritonServer, model: str) -> None:
        self._server, self._model = server, model
        self.wait_until_idle()
        self._before = samples(server)

    def wait_until_idle(self) -> None:
        names = [PREFIX + name for name in ("waiting_requests", "running_requests", "live_states", "remaining_steps")]
        wait_until(lambda: not any(metric(self._server, self._model, name) for name in names), "the engine is idle")

    def __call__(self, name: str, **labels: str) -> float:
        name, wanted = PREFIX + name, {"model": self._model, **labels}.items()
        before = sum(one.value for one in self._before if one.name == name and wanted <= one.labels.items())
        return metric(self._server, self._model, name, **labels) - before

    def wait_for_requests(self, count: int, **labels: str) -> None:
        """Until so many were counted: that is after they were answered. No others were."""
        wait_until(lambda: self("requests_total") == count, f"{count} requests are counted")
        assert self("requests_total", **labels) == count
        self.wait_until_idle()


@pytest.mark.parametrize("model", ["tiny", "stepwise"])
def test_what_was_completed(server: TritonServer, model: str) -> None:
    since = Since(server, model)
    params = [SamplingParams(num_inference_steps=3 + n, num_images_per_prompt=1 + n % 2, height=16) for n in range(5)]
    with DiffusionClient(server.grpc_url, model) as client:
        results = [result.raise_for_error() for result in client.generate(["a cat"] * 5, params)]
    since.wait_for_requests(5, outcome="completed", reason="")
    receipts = [result.receipt for result in results if result.receipt is not None]
    assert since("images_total") == sum(len(result.images) for result in results) == 7
    assert since("pixels_total") == sum(image.width * image.height for result in results for image in result.images)
    assert since("cancelled_steps_saved_total") == 0

    # Whichever of them met in a wave: a request's steps are as many as it asked for.
    steps = since("steps_total")
    assert 7 <= steps <= sum(receipt.steps for receipt in receipts)
    assert since("step_seconds_count") == steps
    # Two rows for each image, because of the negative prompt; those of a step are in one pass, as there are few.
    assert since("forward_rows_count") == steps
    assert since("forward_rows_sum") == sum(
        2 * receipt.steps * len(result.seeds) for receipt, result in zip(receipts, results, strict=True)
    )
    if model == "stepwise":  # every step is a wave
        assert since("wave_requests_count") == steps
        assert since("wave_requests_sum") == sum(receipt.steps for receipt in receipts)
    else:
        assert since("wave_requests_count") == len({receipt.wave_id for receipt in receipts})
        assert since("wave_requests_sum") == 5

    for name, milliseconds in (
        ("admission_wait", [receipt.queue_ms for receipt in receipts]),
        ("encode", [receipt.encode_ms for receipt in receipts]),
        ("decode", [receipt.decode_ms for receipt in receipts]),
    ):
        assert since(f"{name}_seconds_count") == 5
        assert since(f"{name}_seconds_sum") == pytest.approx(sum(milliseconds) / 1000, abs=1e-5)
    assert since("request_seconds_count") == 5
    spent = [r.queue_ms + r.encode_ms + r.denoise_ms + r.decode_ms for r in receipts]
    assert since("request_seconds_sum") > sum(spent) / 1000


def test_a_step_of_more_rows_than_max_num_seqs_is_several_passes(server: TritonServer) -> None:
    since = Since(server, "one_at_a_time")
    with DiffusionClient(server.grpc_url, "one_at_a_time") as client:
        params = SamplingParams(num_inference_steps=4, num_images_per_prompt=3)
        client.generate("a cat", params)[0].raise_for_error()
    since.wait_for_requests(1, outcome="completed")
    assert since("steps_total") == since("step_seconds_count") == 4
    assert since("forward_rows_count") == since("forward_rows_bucket", le="2") == 4 * 3
    assert since("forward_rows_bucket", le="1") == 0, "the negative prompt is in the same pass"


def test_the_steps_of_a_cancelled_request_are_taken_or_saved(server: TritonServer) -> None:
    since = Since(server, "stepwise")

    async def cancel() -> None:
        async with AsyncDiffusionClient(server.grpc_url, "stepwise") as client:
            task = asyncio.create_task(client.generate("a cat", SamplingParams(num_inference_steps=1000)))
            await asyncio.to_thread(wait_for_running, server, "stepwise", 1)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    asyncio.run(cancel())
    since.wait_for_requests(1, outcome="cancelled", reason="request_cancelled_error")
    assert 0 < since("steps_total") < 1000
    assert since("steps_total") + since("cancelled_steps_saved_total") == 1000


def test_an_expired_request(server: TritonServer) -> None:
    since = Since(server, "stepwise")
    assert "has passed" in infer(server, "stepwise", {"num_inference_steps": 1000}, timeout=200_000)
    since.wait_for_requests(1, outcome="expired", reason="deadline_exceeded_error")
    assert since("steps_total") + since("cancelled_steps_saved_total") == 1000
    assert since("request_seconds_sum") >= 0.2
    assert since("request_seconds_bucket", le="0.1") == 0


@pytest.mark.parametrize(
    ("reason", "parameters"),
    [
        ("unknown_field_error", {"stepps": 3}),
        ("field_type_error", {"num_inference_steps": "many"}),
        ("field_value_error", {"height": 17}),
        ("field_value_error", {"num_inference_steps": 0}),
    ],
)
def test_bad_input_is_counted_by_its_reason(
    server: TritonServer, reason: str, parameters: dict[str, int | str]
) -> None:
    since = Since(server, "tiny")
    assert infer(server, "tiny", parameters)
    since.wait_for_requests(1, outcome="refused", reason=reason)
    assert since("steps_total") == since("request_seconds_count") == 0


def test_what_the_full_queue_refuses(server: TritonServer) -> None:
    since = Since(server, "one_at_a_time")
    with DiffusionClient(server.grpc_url, "one_at_a_time") as client:
        results = client.generate(["a cat"] * 12, SamplingParams(num_inference_steps=30))
    refused = sum(result.error is not None for result in results)
    assert refused > 0
    wait_until(lambda: since("requests_total") == 12, "12 requests are counted")
    assert since("requests_total", outcome="refused", reason="queue_full_error") == refused
    assert since("requests_total", outcome="completed", reason="") == 12 - refused
    assert since("wave_requests_sum") == since("wave_requests_bucket", le="1") == 12 - refused


@pytest.mark.parametrize("fault", ["fault in parse", "fault in add_requests", "fault in the runner", "fault in send"])
def test_a_fault_of_ours_is_a_failed_request(server: TritonServer, fault: str) -> None:
    since = Since(server, "faulty")
    with DiffusionClient(server.grpc_url, "faulty") as client:
        assert client.generate(fault)[0].error is not None
    since.wait_for_requests(1, outcome="failed", reason="execution_error")
    assert since("images_total") == 0


def test_waiting_and_running_requests_by_key(server: TritonServer) -> None:
    since = Since(server, "stepwise")
    sizes = [(16 * height, 16 * width) for height in range(1, 6) for width in range(1, 6)][: MOST_KEYS + 4]
    params = [SamplingParams(num_inference_steps=1000, height=height, width=width) for height, width in sizes]

    def counts(name: str) -> dict[str, float]:
        found = [one for one in samples(server) if one.name == PREFIX + name and one.labels["model"] == "stepwise"]
        return {one.labels["key"]: one.value for one in found}

    async def send() -> None:
        async with AsyncDiffusionClient(server.grpc_url, "stepwise") as client:
            task = asyncio.create_task(client.generate(["a cat"] * len(params), params))
            everybody = len(params)
            await asyncio.to_thread(
                wait_until,
                lambda: sum([*counts("waiting_requests").values(), *counts("running_requests").values()]) == everybody,
                "all requests are in the engine",
            )
            waiting, running = counts("waiting_requests"), counts("running_requests")
            assert len(waiting) <= MOST_KEYS + 1
            assert waiting.keys() == running.keys(), "a sum of both has every key"
            assert waiting["other"] + running["other"] >= 4
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    asyncio.run(send())
    since.wait_for_requests(len(params), outcome="cancelled")
    assert since("admission_wait_seconds_count") == len(params), "those that never ran waited too"
    assert since("steps_total") + since("cancelled_steps_saved_total") >= 1000 * len(params)


def test_every_metric_is_there_from_the_start_with_its_type_and_meaning(server: TritonServer) -> None:
    with urllib.request.urlopen(f"http://{server.metrics_url}/metrics") as response:
        families = {family.name: family for family in text_string_to_metric_families(response.read().decode())}
    for name, declared in METRICS.items():
        family = families[name.removesuffix("_total")]
        assert (family.type, family.documentation) == (declared.kind, declared.description)
        labels = {"model", "instance", *declared.labels, *(["le"] if declared.kind == "histogram" else [])}
        for model in ("tiny", "one_at_a_time", "faulty", "stepwise", "pixart"):
            mine = [sample for sample in family.samples if sample.labels["model"] == model]
            assert set().union(*(sample.labels for sample in mine)) == labels
    assert {name for name in families if name.startswith(PREFIX)} == {name.removesuffix("_total") for name in METRICS}


def test_memory_on_the_cpu_is_the_processs_largest_resident_set(server: TritonServer) -> None:
    infer(server, "tiny", {})
    pids = [child.pid for child in psutil.Process(server.pid).children() if "tiny_0_0" in " ".join(child.cmdline())]
    (status,) = [Path(f"/proc/{pid}/status").read_text() for pid in pids]
    largest = next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM"))
    published = metric(server, "tiny", PREFIX + "device_memory_peak_bytes")
    assert largest / 2 < published <= largest


def infer(server: TritonServer, model: str, parameters: dict[str, int | str], timeout: int | None = None) -> str:
    """The error of a request that no client of ours would send, or nothing."""
    connection = tritonclient.grpc.InferenceServerClient(server.grpc_url)
    prompt = tritonclient.grpc.InferInput("prompt", [1, 1], "BYTES")
    prompt.set_data_from_numpy(np.array([["a cat"]], object))
    try:
        connection.infer(model, [prompt], parameters=parameters, timeout=timeout)
    except tritonclient.utils.InferenceServerException as error:
        return str(error)
    finally:
        connection.close()
    return ""
