"""The client's parts that need no server."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import PIL.Image
import pytest
from triton_diffusion.cli import app
from triton_diffusion_client import (
    DiffusionClient,
    GenerationResult,
    InvalidRequestError,
    SamplingParams,
    ServerUnavailableError,
)
from triton_diffusion_client.prompt import prompt_inputs
from triton_diffusion_client.result import file_stem
from typer.testing import CliRunner

from tests.receipts import receipt_of

PICTURE = PIL.Image.fromarray(np.random.default_rng(0).integers(0, 256, [8, 6, 3], np.uint8))


def test_an_image_may_be_given_in_many_ways(tmp_path: Path) -> None:
    PICTURE.save(tmp_path / "picture.png")
    file = io.BytesIO()
    PICTURE.save(file, "png")
    for image in (PICTURE, np.asarray(PICTURE), tmp_path / "picture.png", file.getvalue()):
        inputs = prompt_inputs({"prompt": "a", "multi_modal_data": {"image": image}})
        assert np.array_equal(inputs["image"], np.asarray(PICTURE))


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (5, "a prompt is a string or a dict, not int"),
        ({"negative_prompt": "a"}, "a prompt dict needs the key 'prompt'"),
        ({"promt": "a"}, "unknown key 'promt' of a prompt, did you mean 'prompt'"),
        ({"prompt": "a", "multi_modal_data": {"audio": b""}}, "unknown key 'audio' of multi_modal_data"),
        ({"prompt": "a", "multi_modal_data": {"image": b"no picture"}}, "image cannot be read"),
        ({"prompt": "a", "multi_modal_data": {"image": "nowhere.png"}}, "image cannot be read: .*nowhere.png"),
    ],
)
def test_a_wrong_prompt_is_explained(prompt: object, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        prompt_inputs(prompt)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("prompt", "stem"),
    [
        ("A large, red circle!", "a-large-red-circle"),
        ("../../etc/passwd", "etc-passwd"),
        ("🐈", "image"),
        ("word " * 30, "word-word-word-word-word-word-word-word"),
    ],
)
def test_a_prompt_becomes_a_safe_file_name(prompt: str, stem: str) -> None:
    assert file_stem(prompt) == stem


def test_a_png_file_holds_all_that_makes_the_picture_again(tmp_path: Path) -> None:
    receipt = receipt_of(seed=7, height=8, width=6, num_images_per_prompt=2)
    result = GenerationResult(prompt="ein Kätzchen", images=[PICTURE, PICTURE], seeds=[7, 8], receipt=receipt)
    paths = result.save(tmp_path / "new")
    assert [path.name for path in paths] == ["ein-kätzchen-seed7.png", "ein-kätzchen-seed8.png"]
    text = PIL.Image.open(paths[1]).info
    assert (text["prompt"], text["seed"]) == ("ein Kätzchen", "8")
    assert json.loads(text["parameters"]) == {"seed": 8, "height": 8, "width": 6, "num_images_per_prompt": 1}


def test_nobody_there_is_an_error_of_each_request() -> None:
    with DiffusionClient("127.0.0.1:1") as client:
        assert not client.is_ready()
        results = client.generate(["a", "b"])
    assert [type(result.error) for result in results] == [ServerUnavailableError] * 2
    with pytest.raises(ServerUnavailableError):
        results[0].raise_for_error()


def test_numbers_of_numpy_are_numbers() -> None:
    with DiffusionClient("127.0.0.1:1") as client:
        params = SamplingParams(height=np.int64(64), guidance_scale=np.float32(5))  # type: ignore[arg-type]
        assert isinstance(client.generate("a", params)[0].error, ServerUnavailableError)


def test_an_error_of_a_callback_is_raised_when_all_is_done() -> None:
    seen = []

    def on_result(result: GenerationResult) -> None:
        seen.append(result)
        raise KeyError("mine")

    with DiffusionClient("127.0.0.1:1") as client, pytest.raises(KeyError, match="mine"):
        client.generate(["a", "b"], on_result=on_result)
    assert len(seen) == 2


def test_a_callback_that_waits_for_its_own_client_is_told_so() -> None:
    def on_result(_: GenerationResult) -> None:
        client.generate("b")

    with DiffusionClient("127.0.0.1:1") as client, pytest.raises(RuntimeError, match="would wait for itself"):
        client.generate("a", on_result=on_result)


def test_an_unknown_transport_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="unknown transport 'https': use grpc:// or http://"):
        DiffusionClient("https://127.0.0.1:1")


def test_sampling_params_must_be_one_or_one_each() -> None:
    with (
        DiffusionClient("127.0.0.1:1") as client,
        pytest.raises(InvalidRequestError, match="2 sampling_params for 3 prompts"),
    ):
        client.generate(["a", "b", "c"], [SamplingParams()] * 2)


def test_the_command_offers_every_sampling_parameter() -> None:
    text = CliRunner().invoke(app, ["generate", "--help"], env={"COLUMNS": "200"}).output
    for option in ("--seed", "--height", "--steps", "--guidance-scale", "--negative-prompt", "--out"):
        assert option in text
