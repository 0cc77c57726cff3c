"""Step-wise continuous batching on the real server."""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
import threading
import time
from typing import Any

import numpy as np
import psutil
import pytest
import tritonclient.grpc

from tests.example_requests import mixed_requests, stock_call
from tests.server.conftest import metric, wait_until_idle
from triton_diffusion.embedded import TritonServer
from triton_diffusion_client import AsyncDiffusionClient, DiffusionClient, GenerationResult, SamplingParams


@pytest.fixture
def stepwise(server: TritonServer) -> DiffusionClient:
    return DiffusionClient(server.grpc_url, model="stepwise")


def pixels(result: GenerationResult) -> list[bytes]:
    return [image.tobytes() for image in result.raise_for_error().images]


def test_requests_that_join_at_different_steps_equal_the_stock_call(
    stepwise: DiffusionClient, stable_diffusion: Any
) -> None:
    requests = mixed_requests(8)
    results: list[GenerationResult | None] = [None] * 8

    def send(number: int) -> None:
        request = requests[number]
        prompt = {"prompt": request.prompt}
        if request.negative_prompt is not None:
            prompt["negative_prompt"] = request.negative_prompt
        results[number] = stepwise.generate(prompt, request.sampling_params)[0]

    threads = [threading.Thread(target=send, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
        time.sleep(0.03)
    for thread in threads:
        thread.join()
    for request, result in zip(requests, results, strict=True):
        assert result is not None
        alone = [np.asarray(image, dtype=int) for image in stock_call(stable_diffusion, request, "pil")]
        for image, stock in zip(result.raise_for_error().images, alone, strict=True):
            assert np.abs(np.asarray(image, dtype=int) - stock).max() <= 1
        assert result.receipt is not None
        assert len(result.receipt.rows_per_step) == result.receipt.steps
    stepwise.close()


def test_progress_is_a_metric(server: TritonServer, stepwise: DiffusionClient) -> None:
    wait_until_idle(server, "stepwise")
    before = metric(server, "stepwise", "triton_diffusion_steps_total")
    long = threading.Thread(target=stepwise.generate, args=("a cat", SamplingParams(num_inference_steps=500)))
    long.start()
    live, remaining = [], []
    while long.is_alive():
        live.append(metric(server, "stepwise", "triton_diffusion_live_states"))
        remaining.append(metric(server, "stepwise", "triton_diffusion_remaining_steps"))
    assert set(live) <= {0, 1}
    while_it_ran = [steps for steps in remaining if steps]
    assert while_it_ran == sorted(while_it_ran, reverse=True)
    assert 500 > while_it_ran[0] > while_it_ran[-1] > 0, "however often we looked, more than once"
    wait_until_idle(server, "stepwise")
    assert metric(server, "stepwise", "triton_diffusion_steps_total") == before + 500
    stepwise.close()


KILLED_CLIENT = """\
import sys
from triton_diffusion_client import DiffusionClient, SamplingParams
with DiffusionClient(sys.argv[1], "stepwise") as client:
    print("sends", flush=True)
    client.generate(["a dog"] * 25, SamplingParams(num_inference_steps=200), progress=False)
"""


def test_two_hundred_stopped_requests_leave_no_trace_in_the_two_hundred_that_stay(server: TritonServer) -> None:
    # Stopped by gRPC cancel, by their own deadline, and by the death of their client, at random moments.
    chance = random.Random(0)
    stay = [
        SamplingParams(seed=number, num_inference_steps=chance.randint(1, 6), height=16 * chance.randint(1, 2))
        for number in range(200)
    ]
    prompts = [f"picture {number}" for number in range(200)]
    with DiffusionClient(server.grpc_url, "stepwise") as client:
        undisturbed = [pixels(result) for result in client.generate(prompts, stay)]
    wait_until_idle(server, "stepwise")
    stub = max(psutil.Process(server.pid).children(), key=lambda child: "stepwise" in " ".join(child.cmdline()))
    memory = stub.memory_info().rss

    command = [sys.executable, "-c", KILLED_CLIENT, server.grpc_url]
    killed = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    for process in killed:
        assert process.stdout is not None
        assert process.stdout.readline() == "sends\n"

    async def disturbed() -> list[GenerationResult]:
        async with AsyncDiffusionClient(server.grpc_url, "stepwise") as client:

            async def cancelled() -> None:
                await asyncio.sleep(chance.random() * 3)
                task = asyncio.create_task(client.generate("a dog", SamplingParams(num_inference_steps=200)))
                await asyncio.sleep(chance.random())
                task.cancel()

            leaving = [asyncio.create_task(cancelled()) for _ in range(75)]
            late = [asyncio.create_task(expired(server, chance.random())) for _ in range(75)]
            await asyncio.sleep(1)
            staying = asyncio.create_task(client.generate(prompts, stay))
            await asyncio.sleep(2.5)
            for process in killed:
                process.kill()
            await asyncio.gather(*leaving, *late)
            return await staying

    results = asyncio.run(disturbed())
    assert [pixels(result) for result in results] == undisturbed
    wait_until_idle(server, "stepwise")
    assert metric(server, "stepwise", "triton_diffusion_running_requests") == 0
    assert stub.memory_info().rss < memory + 50 * 2**20
    for process in killed:
        process.wait()


async def expired(server: TritonServer, seconds: float) -> None:
    """A request that ends by its own timeout."""
    prompt = tritonclient.grpc.InferInput("prompt", [1, 1], "BYTES")
    prompt.set_data_from_numpy(np.array([["a bird"]], object))
    await asyncio.sleep(seconds * 2)

    def infer() -> None:
        connection = tritonclient.grpc.InferenceServerClient(server.grpc_url)
        with pytest.raises(Exception, match="timeout of .* has passed"):
            connection.infer(
                "stepwise",
                [prompt],
                outputs=[tritonclient.grpc.InferRequestedOutput("images")],
                parameters={"num_inference_steps": 1000},
                timeout=round(1e5 + seconds * 1e6),
            )
        connection.close()

    await asyncio.to_thread(infer)
