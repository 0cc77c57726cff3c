"""The client's parts that need no server."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from types import MappingProxyType

import imageio.v3
import numpy as np
import PIL.Image
import PIL.ImageSequence
import pytest
from typer.testing import CliRunner

from tests.receipts import receipt_of
from triton_diffusion.cli import app
from triton_diffusion_client import (
    DiffusionClient,
    DiffusionClientError,
    GenerationResult,
    InvalidRequestError,
    SamplingParams,
    ServerUnavailableError,
)
from triton_diffusion_client.prompt import prompt_inputs
from triton_diffusion_client.result import file_stem

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
        ({"prompt": "a", "multi_modal_data": {"image": None}}, "image cannot be read"),
        ({"prompt": "a", "multi_modal_data": {"image": 3}}, "image cannot be read"),
        ({"prompt": "a", "multi_modal_data": {"image": "nowhere.png"}}, "image cannot be read: .*nowhere.png"),
    ],
)
def test_a_wrong_prompt_is_explained(prompt: object, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        prompt_inputs(prompt)  # type: ignore[arg-type]


def test_a_photograph_that_was_taken_sideways_is_turned_upright() -> None:
    file = io.BytesIO()
    exif = PIL.Image.Exif()
    exif[0x0112] = 6  # orientation: turn right
    PICTURE.save(file, "jpeg", exif=exif)
    image = prompt_inputs({"prompt": "a", "multi_modal_data": {"image": file.getvalue()}})["image"]
    assert image.shape == (6, 8, 3)


def test_files_are_not_overwritten(tmp_path: Path) -> None:
    result = GenerationResult(prompt="a", images=[PICTURE], seeds=[7])
    names = [result.save(tmp_path)[0].name for _ in range(3)]
    assert names == ["a-seed7.png", "a-seed7-2.png", "a-seed7-3.png"]


def test_any_mapping_is_one_prompt() -> None:
    prompt = MappingProxyType({"prompt": "a", "negative_prompt": "b"})
    with DiffusionClient("127.0.0.1:1") as client:
        results = client.generate(prompt)
    assert [result.prompt for result in results] == ["a"]


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
    for option in (
        "--seed",
        "--height",
        "--steps",
        "--guidance-scale",
        "--negative-prompt",
        "--out",
        "--video-format",
    ):
        assert option in text


def video_of(width: int, height: int) -> GenerationResult:
    """A video of five very different frames."""
    pixels = np.random.default_rng(0).integers(0, 256, [5, height, width, 3], np.uint8)
    return GenerationResult(
        prompt="ein Kätzchen", videos=[[PIL.Image.fromarray(frame) for frame in pixels]], seeds=[7]
    )


@pytest.mark.parametrize(("width", "height"), [(32, 16), (7, 5)])
@pytest.mark.parametrize("video_format", ["webp", "gif"])
def test_an_animation_has_all_frames(tmp_path: Path, video_format: str, width: int, height: int) -> None:
    (path,) = video_of(width, height).save(tmp_path, "cat", video_format=video_format, fps=10)
    assert path == tmp_path / f"cat-seed7.{video_format}"
    with PIL.Image.open(path) as animation:
        assert (animation.format, animation.size) == (video_format.upper(), (width, height))
        assert len(list(PIL.ImageSequence.Iterator(animation))) == 5
        assert animation.info["loop"] == 0, "for ever"
        animation.seek(1)
        animation.load()
        assert animation.info["duration"] == 100
        if video_format == "gif":
            assert animation.info["comment"].decode() == "ein Kätzchen"


@pytest.mark.parametrize(
    ("width", "height", "made"), [(32, 16, (32, 16)), (33, 17, (34, 18)), (32, 17, (32, 18)), (1, 1, (2, 2))]
)
def test_an_mp4_has_all_frames_and_even_sides(tmp_path: Path, width: int, height: int, made: tuple[int, int]) -> None:
    (path,) = video_of(width, height).save(tmp_path, video_format="mp4", fps=10)
    assert path == tmp_path / "ein-kätzchen-seed7.mp4"
    assert imageio.v3.imread(path, plugin="FFMPEG").shape == (5, made[1], made[0], 3)
    assert imageio.v3.immeta(path, plugin="FFMPEG")["fps"] == 10


def test_an_odd_side_of_an_mp4_repeats_its_last_pixels(tmp_path: Path) -> None:
    pixels = np.repeat(np.arange(0, 33 * 7, 7, dtype=np.uint8)[None, :, None], 3, axis=2).repeat(17, axis=0)
    result = GenerationResult(prompt="a", videos=[[PIL.Image.fromarray(pixels)] * 3], seeds=[7])
    (path,) = result.save(tmp_path, video_format="mp4")
    frames = imageio.v3.imread(path, plugin="FFMPEG").astype(int)
    assert frames.shape == (3, 18, 34, 3)
    assert np.abs(frames[:, :17, :33] - pixels).max() < 16, "compressed, and not resized"


@pytest.mark.parametrize("missing", ["imageio", "imageio_ffmpeg"])
def test_mp4_without_its_packages_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    message = r"pip install 'triton-diffusion\[video\]'"
    with pytest.raises(DiffusionClientError, match=message):
        video_of(32, 16).save(tmp_path / "new", video_format="mp4")
    assert not (tmp_path / "new").exists()
    assert video_of(32, 16).save(tmp_path, video_format="gif")
    assert GenerationResult(prompt="a", images=[PICTURE], seeds=[7]).save(tmp_path, video_format="mp4"), "no video"
    result = CliRunner().invoke(app, ["generate", "a", "--url", "127.0.0.1:1", "--video-format", "mp4"])
    with pytest.raises(DiffusionClientError, match=message):
        raise result.exception or AssertionError(result.output)


def test_an_unknown_video_format_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match="unknown video format 'avi': use one of webp, gif, mp4"):
        video_of(32, 16).save(tmp_path, video_format="avi")
