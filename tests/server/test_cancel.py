"""Cancelled requests free their rows; the others' pictures do not change."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from tests.server.conftest import occupied, wait_for_log, wait_for_running, wait_for_waiting, wait_until_idle
from triton_diffusion.embedded import TritonServer
from triton_diffusion_client import (
    AsyncDiffusionClient,
    DiffusionClient,
    GenerationResult,
    SamplingParams,
    ServerUnavailableError,
)

LONG = SamplingParams(seed=1, num_inference_steps=150)


def finished_waves(server: TritonServer, since: int) -> list[tuple[int, int]]:
    """Requests and completed requests of each wave that the log shows."""
    found = [re.search(r"(\d+) requests \((\d+) completed\)", line) for line in list(server.log_lines)[since:]]
    return [(int(match[1]), int(match[2])) for match in found if match]


def pixels(result: GenerationResult) -> Any:
    return np.asarray(result.raise_for_error().images[0], dtype=int)


async def one_stays_and_one_leaves(server: TritonServer) -> GenerationResult:
    async with (
        AsyncDiffusionClient(server.grpc_url, "tiny") as stays,
        AsyncDiffusionClient(server.grpc_url, "tiny") as leaves,
    ):
        with occupied(server, "tiny"):
            staying = asyncio.create_task(stays.generate("a cat", LONG))
            leaving = asyncio.create_task(leaves.generate("a dog", SamplingParams(seed=2, num_inference_steps=1000)))
            await asyncio.to_thread(wait_for_waiting, server, "tiny", 2)
        await asyncio.to_thread(wait_for_running, server, "tiny", 2)
        leaving.cancel()
        return (await staying)[0]


def test_a_cancelled_request_leaves_its_wave_and_the_other_is_unchanged(server: TritonServer) -> None:
    position = len(server.log_lines)
    result = asyncio.run(one_stays_and_one_leaves(server))
    assert result.receipt is not None
    assert result.receipt.wave_size == 2
    wait_for_log(server, "2 requests (1 completed)", since=position)
    with DiffusionClient(server.grpc_url, "tiny") as client:
        alone = client.generate("a cat", LONG)[0]
    assert np.abs(pixels(result) - pixels(alone)).max() <= 1


def test_the_request_of_a_killed_client_ends(server: TritonServer) -> None:
    position = len(server.log_lines)
    script = (
        "from triton_diffusion_client import DiffusionClient, SamplingParams\n"
        f"with DiffusionClient('{server.grpc_url}', 'tiny') as client:\n"
        "    client.generate('a cat', SamplingParams(num_inference_steps=1000, num_images_per_prompt=8))\n"
    )
    wait_until_idle(server, "tiny")
    client = subprocess.Popen([sys.executable, "-c", script])
    wait_for_running(server, "tiny", 1)
    os.kill(client.pid, signal.SIGKILL)
    client.wait()
    wait_for_log(server, "1 requests (0 completed)", since=position)


def test_a_clients_timeout_ends_its_request(server: TritonServer) -> None:
    position = len(server.log_lines)
    with DiffusionClient(server.grpc_url, "tiny", timeout=0.6) as client:
        result = client.generate("a cat", SamplingParams(num_inference_steps=1000, num_images_per_prompt=8))[0]
    assert isinstance(result.error, ServerUnavailableError)
    # On a slow machine it may not even have begun.
    wait_until_idle(server, "tiny")
    assert not [wave for wave in finished_waves(server, position) if wave[1] > 0]


@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_a_requests_own_timeout_is_kept_between_steps(server: TritonServer, protocol: str) -> None:
    import tritonclient.http

    triton = tritonclient.grpc if protocol == "grpc" else tritonclient.http
    connection = triton.InferenceServerClient(server.grpc_url if protocol == "grpc" else server.http_url)
    prompt = triton.InferInput("prompt", [1, 1], "BYTES")
    prompt.set_data_from_numpy(np.array([["a cat"]], object))
    with pytest.raises(Exception, match=r"the request's timeout of 0\.300 s has passed"):
        connection.infer(
            "tiny",
            [prompt],
            outputs=[triton.InferRequestedOutput("images")],
            parameters={"num_inference_steps": 1000},
            timeout=300_000,
        )
    connection.close()


def test_memory_that_a_cancelled_request_may_still_write_to_does_not_crash_the_server(server: TritonServer) -> None:
    large = SamplingParams(height=128, width=128, num_images_per_prompt=6, num_inference_steps=40)

    async def cancel_and_close() -> None:
        async with AsyncDiffusionClient(server.grpc_url, "tiny") as client:
            work = asyncio.create_task(client.generate("a cat", large))
            await asyncio.to_thread(wait_for_running, server, "tiny", 1)
            work.cancel()

    for _ in range(3):
        asyncio.run(cancel_and_close())
    with DiffusionClient(server.grpc_url, "tiny") as client:
        client.generate("a dog")[0].raise_for_error()
    assert server.poll() is None
