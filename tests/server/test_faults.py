"""A fault anywhere in our own code is answered, and the server and the next requests are well."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import tritonclient.grpc
from tritonclient.utils import InferenceServerException

from tests.server.conftest import occupied, wait_until
from triton_diffusion.embedded import TritonServer
from triton_diffusion_client import (
    DiffusionClient,
    GenerationResult,
    SamplingParams,
    ServerError,
    ServerUnavailableError,
)


@pytest.mark.parametrize("fault", ["fault in parse", "fault in add_requests", "fault in the runner", "fault in send"])
def test_a_fault_is_answered_and_the_server_lives(server: TritonServer, fault: str) -> None:
    with DiffusionClient(server.grpc_url, "faulty") as client:
        for _ in range(3):
            neighbour, faulty = client.generate(["a cat", fault])
            assert isinstance(faulty.error, ServerError)
            assert fault in str(faulty.error)
            assert "Traceback" not in str(faulty.error)
            assert ".py" not in str(faulty.error)
            if fault in ("fault in parse", "fault in send"):  # these concern one request only
                assert len(neighbour.raise_for_error().images) == 1
        client.generate("a dog")[0].raise_for_error()
    assert server.poll() is None


def test_a_backlog_over_max_queue_size_is_refused_at_once(server: TritonServer) -> None:
    answered: list[GenerationResult] = []
    with DiffusionClient(server.grpc_url, "one_at_a_time") as client, ThreadPoolExecutor(1) as sender:
        with occupied(server, "one_at_a_time"):
            sent = sender.submit(client.generate, ["a cat"] * 12, on_result=answered.append)
            wait_until(lambda: len(answered) == 10, "all but the two that may wait are refused while another one runs")
            refused = list(answered)
        results = sent.result()
    for result in refused:
        assert isinstance(result.error, ServerUnavailableError)
        assert "2 requests wait already (max_queue_size): try again later" in str(result.error)
    assert sum(result.error is None for result in results) == 2, "those that might wait got their pictures"


def test_each_request_of_many_gets_exactly_one_answer(server: TritonServer) -> None:
    position = len(server.log_lines)
    prompts = ["a cat", "", "fault in parse", "fault in send", "a dog"] * 20
    with DiffusionClient(server.grpc_url, "faulty") as client:
        results = client.generate(prompts, SamplingParams(num_inference_steps=1, height=16, width=16))
    assert len(results) == 100
    assert sum(result.error is None for result in results) == 40
    assert not any("could not be sent" in line and "fault" not in line for line in list(server.log_lines)[position:])


def test_outputs_are_made_only_when_they_are_asked_for(server: TritonServer) -> None:
    connection = tritonclient.grpc.InferenceServerClient(server.grpc_url)
    prompt = tritonclient.grpc.InferInput("prompt", [1, 1], "BYTES")
    prompt.set_data_from_numpy(np.array([["a cat"]], object))

    def made(*names: str) -> set[str]:
        outputs = [tritonclient.grpc.InferRequestedOutput(name) for name in names] or None
        response = connection.infer("tiny", [prompt], outputs=outputs).get_response()
        return {output.name for output in response.outputs}

    assert made("seed_used") == {"seed_used"}
    assert made("images", "receipt") == {"images", "receipt"}
    assert made() == {"generated_image", "seed_used", "receipt"}
    with pytest.raises(InferenceServerException):
        made("no_such_output")
    connection.close()
