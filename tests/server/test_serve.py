"""A checkpoint that save_pretrained wrote is served by one command, and its waves are as large as it was told."""

from __future__ import annotations

import json
import re
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from typer.testing import CliRunner

from tests.families import BY_NAME
from tests.server.conftest import PATIENCE, TINY_DEFAULTS, metric, wait_until
from tests.server.serving import Serving
from triton_diffusion.cli import app
from triton_diffusion_client import DiffusionClient, Prompt, SamplingParams

pytestmark = pytest.mark.timeout(900)  # one core and eight models that import torch

WAIT = "10000"
"""Milliseconds within which all requests of a wave arrive, however slow the machine; a full wave does not wait."""


class Served(NamedTuple):
    """A family under the options that it is served with.

    Args:
        wave: the requests of each wave, when there are many of one key.
        options: of the command line; None: it is in the deploy file.
        instances: engines, of which Triton gives each wave to one.
    """

    family: str
    wave: int
    options: tuple[str, ...] | None
    instances: int = 1


ON_TWO = ("--instances", "2", "--device", "cpu")
SERVED = {
    "four": Served("StableDiffusion3", 4, ("--max-num-seqs", "4", "--request-batch-max-wait-ms", WAIT, *ON_TWO), 2),
    "one": Served("StableDiffusion", 1, ("--max-num-seqs", "1")),
    "unset": Served("Flux", 1, ("--request-batch-max-wait-ms", "50")),
    "alias": Served("StableDiffusionXL", 3, ("--diffusion-batch-size", "3", "--request-batch-max-wait-ms", WAIT)),
    "both": Served("StableDiffusion3Img2Img", 2, None),
    "yaml_alias": Served("QwenImage", 2, None),
    "wan": Served("Wan2.2", 3, None),
}
ENGINES = sum(served.instances for served in SERVED.values())
# Qwen2VLProcessor, which a saved QwenImageEdit has, loads only with torchvision. Wan 2.1 is Wan 2.2 with less in it.

DEPLOY_FILE = f"""
models:
  both: {{model: both, max_num_seqs: 2, diffusion_batch_size: 2, request_batch_max_wait_ms: {WAIT}}}
  yaml_alias:
    model: yaml_alias
    diffusion_batch_size: 2
    request_batch_max_wait_ms: {WAIT}
    default_sampling_params: {{height: 32, width: 32}}
  wan:
    model: wan
    max_num_seqs: 3
    request_batch_max_wait_ms: {WAIT}
    default_sampling_params: {{height: 16, width: 16, num_frames: 5, max_sequence_length: 32}}
"""


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("checkpoints")
    for name, served in SERVED.items():
        BY_NAME[served.family].build().save_pretrained(path / name)
    (path / "deploy.yaml").write_text(DEPLOY_FILE)
    return path


@pytest.fixture(scope="module")
def serving(checkpoints: Path) -> Iterator[Serving]:
    """All of them in one server, from a repository that `init` wrote."""
    repository = str(checkpoints / "repository")
    for name, served in SERVED.items():
        if served.options is not None:
            init(repository, str(checkpoints / name), *served.options)
    init(repository, "--config", str(checkpoints / "deploy.yaml"))
    with Serving(repository) as serving:
        yield serving


def init(*arguments: str) -> None:
    ended = CliRunner().invoke(app, ["init", *arguments], catch_exceptions=False)
    assert ended.exit_code == 0


@pytest.mark.parametrize("name", SERVED)
def test_every_family_is_served_in_waves_of_the_size_that_it_was_told(serving: Serving, name: str) -> None:
    served = SERVED[name]
    family = BY_NAME[served.family]
    params = SamplingParams(**family.common | untaken(served.family), num_inference_steps=3, seed=0)
    prompts: list[Prompt] = [prompt(number, bool(family.image_sizes)) for number in range(2 * served.wave)]
    with DiffusionClient(serving.grpc_url, name) as client:
        results = client.generate(prompts, params)
    receipts = [result.raise_for_error().receipt for result in results]
    assert [receipt.wave_size for receipt in receipts if receipt] == [served.wave] * len(prompts)

    with urllib.request.urlopen(f"http://{serving.http_url}/v2/models/{name}/config") as answer:
        assert json.load(answer)["max_batch_size"] == served.wave
    checked = [line for line in serving.lines if "warm-up: 1 wave of" in line]
    assert len(checked) == ENGINES, "each proved its wave before it was ready"


def untaken(family: str) -> dict[str, Any]:
    """Stable Diffusion without T5 does not take what the other families have in common."""
    return {"max_sequence_length": None} if family in ("StableDiffusion", "StableDiffusionXL") else {}


def prompt(number: int, with_image: bool) -> Prompt:
    if not with_image:
        return f"picture {number}"
    image = np.random.default_rng(number).integers(0, 256, (32, 32, 3), np.uint8)
    return {"prompt": f"picture {number}", "multi_modal_data": {"image": image}}


def test_the_log_says_the_same_number(serving: Serving) -> None:
    said = re.findall(r"serving \w+ by .* max_num_seqs (\d+),", serving.log)
    assert sorted(map(int, said)) == sorted(served.wave for served in SERVED.values() for _ in range(served.instances))


def test_two_instances_are_both_busy_and_each_gets_whole_waves_of_one_key(serving: Serving) -> None:
    def completed(instance: str) -> float:
        name = "triton_diffusion_requests_total"
        return metric(serving, "four", name, instance=instance, outcome="completed")

    instances = ("four_0_0", "four_0_1")
    deadline = time.monotonic() + PATIENCE
    with DiffusionClient(serving.grpc_url, "four") as client:
        # Triton gives a wave to whichever instance it likes; that one of them gets them all has to end some time.
        while not all(completed(instance) for instance in instances):
            assert time.monotonic() < deadline
            for size in (16, 32):
                params = SamplingParams(height=size, width=16, num_inference_steps=2, max_sequence_length=32)
                results = client.generate(["a cat"] * 4, params)
                assert [result.receipt.wave_size for result in results if result.receipt] == [4] * 4
    wait_until(lambda: sum(map(completed, instances)) % 4 == 0, "the count of the last wave")
    assert [completed(instance) % 4 for instance in instances] == [0, 0]


def test_a_wave_that_does_not_fit_ends_the_start_with_the_largest_that_does(checkpoints: Path) -> None:
    # A class of one's own, in a module of the current directory.
    options = ["--pipeline-class", "hungry:Hungry", "--default-sampling-params", json.dumps(TINY_DEFAULTS)]
    served = Serving(checkpoints / "four", *options, "--max-num-seqs", "8", cwd=Path(__file__).parents[1])
    reason = served.wait_for_end()
    assert served.process.returncode == 1
    assert reason.startswith("failed to load 'four' version 1: ")
    assert "warm-up: a wave of 8 requests at height=32 width=32 does not fit in memory (cpu: " in reason
    assert "address space limited to" in reason
    assert "DefaultCPUAllocator: can't allocate memory" in reason
    # There is room for five and a half; torch's threads may take some of it.
    assert re.search(r"The largest that fits is [2-5]: set max_num_seqs .max_batch_size. from 8 to [2-5]", reason)
    assert ".py(" not in reason, "the way through our source helps nobody here"


def test_a_checkpoint_is_served_by_its_path_alone_and_nothing_is_left_of_it(checkpoints: Path, tmp_path: Path) -> None:
    (tmp_path / "scratch").mkdir()
    arguments = ["four", "--name", "mine", "--diffusion-batch-size", "2", "--request-batch-max-wait-ms", WAIT]
    arguments += ["--default-sampling-params", json.dumps(TINY_DEFAULTS)]
    arguments += ["--warmup-shapes", '[{"height": 16, "width": 16}]']
    with Serving(*arguments, cwd=checkpoints, TMPDIR=str(tmp_path / "scratch")) as serving:
        assert list((tmp_path / "scratch").glob("*/mine/config.pbtxt")) != []
        with DiffusionClient(serving.grpc_url, "mine") as client:
            results = client.generate(["a cat"] * 4)
        assert [result.raise_for_error().images[0].size for result in results] == [(32, 32)] * 4
        assert {result.receipt.wave_size for result in results if result.receipt} == {2}
        assert {result.receipt.wave_id for result in results if result.receipt} == {1, 2}, "the warm-up is not counted"
    assert "warning: --diffusion-batch-size is deprecated; its name is --max-num-seqs now" in serving.log
    assert "warm-up: 2 waves of 2 requests in" in serving.log
    assert list((tmp_path / "scratch").iterdir()) == []
    assert serving.process.returncode == 0
