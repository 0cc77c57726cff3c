"""Nonsense by every way in: a clear refusal for it, and a picture for its neighbour."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http
from tritonclient.utils import InferenceServerException

from triton_diffusion.embedded import TritonServer
from triton_diffusion_client import DiffusionClient

DATATYPES = {"O": "BYTES", "i": "INT32", "q": "INT64", "f": "FP32", "B": "UINT8", "l": "INT64"}

GOOD = {"prompt": np.array([[b"a cat"]], object)}


def text(*values: bytes) -> np.ndarray[Any, Any]:
    return np.array([list(values)], object)


def infer(
    server: TritonServer, protocol: str, tensors: dict[str, np.ndarray[Any, Any]], parameters: dict[str, Any]
) -> Any:
    """A request by plain tritonclient, as any other client would send it."""
    triton = tritonclient.grpc if protocol == "grpc" else tritonclient.http
    connection = triton.InferenceServerClient(server.grpc_url if protocol == "grpc" else server.http_url)
    inputs = []
    for name, tensor in tensors.items():
        inputs.append(triton.InferInput(name, list(tensor.shape), DATATYPES[tensor.dtype.char]))
        inputs[-1].set_data_from_numpy(tensor)
    outputs = [triton.InferRequestedOutput("images")]
    try:
        return connection.infer("tiny", inputs, outputs=outputs, parameters=parameters)
    finally:
        connection.close()


NONSENSE: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    (GOOD, {"colour": "red"}, "unknown field 'colour'; known are: guidance_scale, height"),
    (GOOD, {"num_inference_step": 5}, "unknown field 'num_inference_step', did you mean 'num_inference_steps'"),
    (GOOD, {"strength": 0.5}, "strength is not taken by StableDiffusion3Pipeline"),
    (GOOD, {"height": "tall"}, "height='tall' is of type str: must be an integer from 1"),
    (GOOD, {"guidance_scale": True}, "guidance_scale=True is of type bool: must be a number from 0 to 100"),
    (GOOD, {"height": 33}, "height=33: must be a multiple of 4; the nearest is 32 or 36"),
    (GOOD, {"num_inference_steps": 0}, "num_inference_steps=0: must be an integer from 1 to 1000"),
    (GOOD, {"seed": -1}, "seed=-1: must be an integer from 0"),
    (GOOD, {"height": 16384, "width": 16384}, "height=16384 width=16384: too many pixels, at most 4194304"),
    (GOOD, {"width": 2**40}, "width=1099511627776: must be an integer from 1 to 16384"),
    ({**GOOD, "guidance_scale": np.array([[np.nan]], np.float32)}, {}, "guidance_scale=nan: must be a number"),
    ({**GOOD, "seed": np.array([[-5]], np.int64)}, {}, "seed=-5: must be an integer from 0"),
    ({"prompt": text(b"")}, {}, "prompt='' has 0 characters: must be a string of 1 to 10000 characters"),
    ({"prompt": text(b"  ")}, {}, "prompt='  ' is blank"),
    ({"prompt": text(b"no\xff\xfe")}, {}, "not valid UTF-8"),
    ({"prompt": text(b"x" * 1_000_000)}, {}, "has 1000000 characters"),
    ({"prompt": text(b"a", b"b").reshape(2, 1)}, {}, "prompt holds 2 values: send one request for each prompt"),
    ({"seed": np.array([[1]], np.int64)}, {}, "prompt is missing: every request needs exactly one prompt"),
    # Triton itself refuses what its own checks see first, and names the input too.
    ({**GOOD, "colour": text(b"red")}, {}, "unexpected inference input 'colour'"),
    ({**GOOD, "height": np.array([[32.0]], np.float32)}, {}, "'height' data-type is 'FP32', but .* expects 'INT32'"),
    ({"prompt": text(b"a", b"b")}, {}, "unexpected shape for input 'prompt'"),
]


@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_nonsense_is_refused_by_name_and_its_neighbours_get_their_pictures(
    server: TritonServer, protocol: str
) -> None:
    def bad(case: tuple[dict[str, Any], dict[str, Any], str]) -> InferenceServerException:
        with pytest.raises(InferenceServerException, match=case[2]) as refused:
            infer(server, protocol, case[0], case[1])
        return refused.value

    with ThreadPoolExecutor(len(NONSENSE) + 4) as clients:
        good = [clients.submit(infer, server, protocol, GOOD, {"seed": seed}) for seed in range(4)]
        refusals = [future.result() for future in [clients.submit(bad, case) for case in NONSENSE]]
        pictures = [future.result().as_numpy("images") for future in good]
    expected = "StatusCode.INVALID_ARGUMENT" if protocol == "grpc" else "400"
    assert [str(refusal.status()) for refusal in refusals] == [expected] * len(NONSENSE)
    assert all(picture.shape == (1, 1, 32, 32, 3) for picture in pictures)


def generate(server: TritonServer, body: bytes) -> tuple[int, str]:
    request = urllib.request.Request(f"http://{server.http_url}/v2/models/tiny/generate", data=body)
    try:
        with urllib.request.urlopen(request) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"prompt": "a", "hieght": 64}, "unknown field 'hieght', did you mean 'height'?"),
        ({"prompt": ["a", "b"]}, "prompt holds 2 values: send one request for each prompt"),
        ({"prompt": "a", "guidance_scale": 1e9}, "guidance_scale=1000000000.0: must be a number from 0 to 100"),
        ({"prompt": "a", "height": 31}, "height=31: must be a multiple of 4; the nearest is 28 or 32"),
    ],
)
def test_nonsense_by_the_generate_endpoint(server: TritonServer, body: dict[str, Any], message: str) -> None:
    status, answer = generate(server, json.dumps(body).encode())
    assert status == 400
    assert message in answer


def test_an_output_that_the_model_does_not_make_is_refused(server: TritonServer) -> None:
    connection = tritonclient.grpc.InferenceServerClient(server.grpc_url)
    prompt = tritonclient.grpc.InferInput("prompt", [1, 1], "BYTES")
    prompt.set_data_from_numpy(GOOD["prompt"])
    with pytest.raises(InferenceServerException, match="output 'videos' is not made by this model: ask for 'images'"):
        connection.infer("tiny", [prompt], outputs=[tritonclient.grpc.InferRequestedOutput("videos")])
    connection.close()


def test_one_items_error_does_not_lose_the_others(client: DiffusionClient) -> None:
    results = client.generate(["a cat", "", "a dog"])
    assert [result.error is None for result in results] == [True, False, True]
    assert "prompt=''" in str(results[1].error)
