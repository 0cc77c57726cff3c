"""On the real server: requests are fused, and each gets what it would get alone."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from tests.example_requests import PROMPTS, mixed_requests, stock_call
from tests.server.conftest import occupied, wait_for_log, wait_for_waiting
from triton_diffusion.embedded import TritonServer
from triton_diffusion_client import DiffusionClient, Prompt, Receipt, SamplingParams


def prompts_of(requests: list[Any]) -> list[Prompt]:
    return [
        request.prompt
        if request.negative_prompt is None
        else {"prompt": request.prompt, "negative_prompt": request.negative_prompt}
        for request in requests
    ]


def test_eight_requests_of_one_key_run_as_one_wave_each_as_if_alone(
    server: TritonServer, client: DiffusionClient, stable_diffusion: Any
) -> None:
    requests = mixed_requests(8)
    sampling_params = [request.sampling_params for request in requests]
    with ThreadPoolExecutor(1) as sender:
        with occupied(server, "tiny"):
            sent = sender.submit(client.generate, prompts_of(requests), sampling_params)
            wait_for_waiting(server, "tiny", 8)
        results = sent.result()
    receipts = [result.raise_for_error().receipt for result in results]
    assert [receipt.wave_size for receipt in receipts if receipt] == [8] * 8
    assert len({receipt.wave_id for receipt in receipts if receipt}) == 1
    assert len({receipt.request_id for receipt in receipts if receipt}) == 8
    for request, result in zip(requests, results, strict=True):
        params = request.sampling_params
        assert result.seeds == params.row_seeds()
        assert result.receipt is not None
        assert result.receipt.steps == params.num_inference_steps
        alone = [np.asarray(image, dtype=int) for image in stock_call(stable_diffusion, request, "pil")]
        assert len(result.images) == len(alone)
        for fused, stock in zip(result.images, alone, strict=True):
            assert np.abs(np.asarray(fused, dtype=int) - stock).max() <= 1


def test_alternating_keys_of_sixteen_clients_run_in_full_waves(server: TritonServer) -> None:
    def one_client(number: int) -> Receipt:
        params = SamplingParams(seed=number, height=(16, 32)[number % 2], num_inference_steps=4)
        with DiffusionClient(server.grpc_url, model="tiny") as client:
            receipt = client.generate(PROMPTS[number % 8], params)[0].raise_for_error().receipt
        assert receipt is not None
        return receipt

    with ThreadPoolExecutor(16) as clients:
        with occupied(server, "tiny"):
            sent = [clients.submit(one_client, number) for number in range(16)]
            wait_for_waiting(server, "tiny", 16)
        receipts = [future.result() for future in sent]
    assert [receipt.wave_size for receipt in receipts] == [8] * 16
    for height in (0, 1):
        assert len({receipt.wave_id for receipt in receipts[height::2]}) == 1, "those of one size share their wave"


def test_a_random_seed_is_reported_and_gives_the_same_picture_again(client: DiffusionClient) -> None:
    first, other = client.generate(["a cat", "a cat"])
    assert first.seeds != other.seeds
    again = client.generate("a cat", SamplingParams(seed=first.seeds[0]))[0]
    assert np.abs(np.asarray(again.images[0], dtype=int) - np.asarray(first.images[0], dtype=int)).max() <= 1


def test_a_pipeline_without_an_adapter_runs_one_request_at_a_time(server: TritonServer) -> None:
    params = SamplingParams(seed=1, num_inference_steps=2, num_images_per_prompt=2)
    with DiffusionClient(server.grpc_url, model="pixart") as client:
        results = client.generate(["a cat", "a dog", "a bird"], params)
    for result in results:
        assert [image.size for image in result.raise_for_error().images] == [(64, 64)] * 2
        assert result.receipt is not None
        assert result.receipt.wave_size == 1


def test_the_log_says_at_start_what_is_served_and_how(server: TritonServer) -> None:
    line = wait_for_log(server, "request_batch_max_wait_ms 200")
    for words in (
        "serving StableDiffusion3Pipeline by StableDiffusion3Adapter on cpu with torch.float32",
        "request batching on",
        "max_num_seqs 8",
        "mode request-level",
    ):
        assert words in line
    wait_for_log(server, "max_num_seqs is 4, but PixArtAlphaPipeline runs one request at a time")


def test_each_prompt_may_have_parameters_of_its_own(client: DiffusionClient) -> None:
    params = [SamplingParams(seed=seed) for seed in (1, 2)]
    results = client.generate(["a cat", "a dog"], params)
    assert [result.seeds for result in results] == [[1], [2]]


def test_an_urgent_request_goes_before_those_that_came_first(server: TritonServer) -> None:
    steps = SamplingParams(num_inference_steps=2)
    with DiffusionClient(server.grpc_url, "one_at_a_time") as client, ThreadPoolExecutor(2) as sender:
        with occupied(server, "one_at_a_time"):
            first = sender.submit(client.generate, "a cat", steps)
            wait_for_waiting(server, "one_at_a_time", 1)
            urgent = sender.submit(client.generate, "a dog", steps, priority=-1)
            wait_for_waiting(server, "one_at_a_time", 2)
        later, earlier = (sent.result()[0].raise_for_error().receipt for sent in (first, urgent))
    assert later is not None
    assert earlier is not None
    assert earlier.wave_id < later.wave_id


def test_a_priority_out_of_bounds_is_refused(client: DiffusionClient) -> None:
    error = client.generate("a cat", priority=1000)[0].error
    assert "priority=1000: must be an integer from -100 to 100" in str(error)
