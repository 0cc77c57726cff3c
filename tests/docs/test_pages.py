"""Every block of code of the README and of docs/ is run or checked; one that nothing here knows fails.

A new page needs nothing if its commands begin with words that `commands.COMMANDS` knows. A block of Python needs an
entry in `PYTHON`, one of YAML in `YAML`, and one of no language in `SHOWN`.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc
import yaml
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2
from typer.testing import CliRunner

from tests.deploy.test_kubernetes import CONTAINER, KUSTOMIZATION
from tests.docs.commands import commands, try_command
from tests.docs.markdown import PAGES, ROOT, Block, anchors, blocks, inline_code, links
from tests.docs.workplace import Workplace, build
from tests.server.conftest import occupied, wait_for_waiting
from triton_diffusion.cli import app
from triton_diffusion.embedded.installation import TritonInstallation
from triton_diffusion_client import DiffusionClient, GenerationResult, SamplingParams

BLOCKS = {str(block): block for page in PAGES for block in blocks(page)}


def of(language: str) -> list[str]:
    return [name for name, block in BLOCKS.items() if block.language == language]


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workplace]:
    place = build(tmp_path_factory.mktemp("workplace"))
    with place.server:
        yield place


@pytest.fixture
def place(workplace: Workplace, monkeypatch: pytest.MonkeyPatch) -> Workplace:
    monkeypatch.chdir(workplace.folder)
    return workplace


def test_every_language_is_known() -> None:
    assert {block.language for block in BLOCKS.values()} <= {"bash", "python", "pbtxt", "yaml", ""}


@pytest.mark.parametrize("name", of("bash"))
def test_the_commands(place: Workplace, name: str) -> None:
    for command in commands(BLOCKS[name]):
        try_command(command, place)


class CheckedClient(DiffusionClient):
    """A client whose requests must not fail."""

    def generate(self, *arguments: Any, **options: Any) -> list[GenerationResult]:
        return [result.raise_for_error() for result in super().generate(*arguments, **options)]


def run_python(block: Block, place: Workplace, **names: object) -> dict[str, Any]:
    """Run a block in which `names` are known already; what it knows afterwards."""
    known: dict[str, Any] = {"__name__": "documentation", **names}
    exec(compile(place.with_addresses(block.text), str(block), "exec"), known)
    return known


def runs(block: Block, place: Workplace) -> None:
    run_python(block, place)


def runs_with_a_client(block: Block, place: Workplace) -> None:
    with CheckedClient(place.server.grpc_url, "sd35") as client:
        run_python(block, place, client=client, SamplingParams=SamplingParams)


def is_a_client_of_the_cluster(block: Block, place: Workplace) -> None:
    """The server here stands for the pods."""
    names = {"triton-diffusion-headless.triton-diffusion:8001": place.server.grpc_url, '"diffusion"': '"sd35"'}
    text = block.text.strip()
    for name, here in names.items():
        text = text.replace(name, here)
    client = eval(text, {"DiffusionClient": DiffusionClient, "tritonclient": tritonclient})
    assert client.is_ready() if isinstance(client, DiffusionClient) else client.is_server_ready()
    client.close()


def receives_a_picture(block: Block, place: Workplace) -> None:
    image = run_python(block, place)["image"]
    assert (image.shape, image.dtype) == ((64, 64, 3), np.uint8)


def is_served(block: Block, place: Workplace) -> None:
    """A file of a model that runs on the server."""
    files = [path.read_text() for path in place.server.model_repository.glob("*/1/*.py")]
    assert place.with_checkpoint(block.text) in files


PYTHON: list[tuple[str, str, Callable[[Block, Workplace], None]]] = [
    ("README.md", "import DiffusionClient", runs),
    ("README.md", "import TritonPythonModel", is_served),
    ("docs/from-model-py.md", "class TritonPythonModel", is_served),
    ("docs/from-model-py.md", "class HouseStyle", is_served),
    ("docs/from-model-py.md", "tritonclient.grpc", receives_a_picture),
    ("docs/kubernetes.md", "triton-diffusion-headless", is_a_client_of_the_cluster),
    ("docs/lora.md", "client.generate", runs_with_a_client),
    ("docs/your-own-class.md", "class OneStockCall", runs),  # what it does: tests/engine/test_own_class.py
]
"""The page of a block, what is in it, and how it is tried."""


def the_check(table: list[Any], block: Block) -> Any:
    found = [entry[2] for entry in table if entry[0] == block.page and entry[1] in block.text]
    assert len(found) == 1, f"{block}: {len(found)} entries of tests/docs/test_pages.py say how it is tried"
    return found[0]


@pytest.mark.parametrize("name", of("python"))
def test_the_python(place: Workplace, name: str) -> None:
    the_check(PYTHON, BLOCKS[name])(BLOCKS[name], place)


@pytest.mark.parametrize("name", of("pbtxt"))
def test_the_model_configurations_are_tritons(name: str) -> None:
    text_format.Parse(BLOCKS[name].text, model_config_pb2.ModelConfig())


def is_a_deploy_file(block: Block, folder: Path) -> None:
    (folder / "deploy.yaml").write_text(block.text)
    shown = CliRunner().invoke(
        app, ["serve", "--config", str(folder / "deploy.yaml"), "--dry-run"], catch_exceptions=False
    )
    assert shown.exit_code == 0
    assert "max_batch_size" in shown.stdout


def is_an_overlay(block: Block, _folder: Path) -> None:
    """What it changes is there to be changed."""
    overlay = yaml.safe_load(block.text)
    image = CONTAINER["image"].partition(":")[0]
    assert {changed["name"] for changed in overlay["images"]} == {image}
    generated = [generator["name"] for generator in KUSTOMIZATION["configMapGenerator"]]
    for generator in overlay["configMapGenerator"]:
        assert generator["name"] in generated
        assert generator["namespace"] == KUSTOMIZATION["namespace"]
    known = {"resources", "images", "configMapGenerator", "namespace", "patches", "replicas", "components"}
    assert set(overlay) <= known


YAML: list[tuple[str, str, Callable[[Block, Path], None]]] = [
    ("README.md", "stage_args:", is_a_deploy_file),
    ("docs/kubernetes.md", "configMapGenerator", is_an_overlay),
]


@pytest.mark.parametrize("name", of("yaml"))
def test_the_yaml(tmp_path: Path, name: str) -> None:
    the_check(YAML, BLOCKS[name])(BLOCKS[name], tmp_path)


def is_only_shown(block: Block) -> None:
    """A drawing, a folder, an output."""


def are_options_of_triton(block: Block) -> None:
    installation = TritonInstallation.find()
    told = subprocess.run(
        [installation.executable, "--help"], env=installation.environment(), capture_output=True, text=True
    )
    for option in block.text.split():
        assert option.partition("=")[0] in told.stdout + told.stderr, option


SHOWN: list[tuple[str, str, Callable[[Block], None]]] = [
    ("README.md", "dynamic batcher", is_only_shown),
    ("docs/lora.md", "ink.safetensors", is_only_shown),
    ("docs/observability.md", "InferRequest (Triton)", is_only_shown),
    ("docs/observability.md", "--trace-config", are_options_of_triton),
    ("docs/reference.md", "TritonDiffusionError", is_only_shown),
]


@pytest.mark.parametrize("name", of(""))
def test_what_is_only_shown(name: str) -> None:
    the_check(SHOWN, BLOCKS[name])(BLOCKS[name])


def test_what_nothing_here_knows_fails(place: Workplace) -> None:
    with pytest.raises(AssertionError, match="does not know how to try wget"):
        try_command("wget localhost:8002/metrics", place)
    with pytest.raises(AssertionError, match=r"docs/new\.md:1 python: 0 entries"):
        the_check(PYTHON, Block("docs/new.md", 1, "python", "import this\n"))


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    for link in links(page):
        if "://" not in link:
            path, _, anchor = link.partition("#")
            target = (ROOT / page).parent / path if path else ROOT / page
            assert target.exists(), link
            if anchor:
                assert anchor in anchors(str(target.resolve().relative_to(ROOT))), link


@pytest.mark.parametrize("page", PAGES)
def test_the_commands_in_the_text_are_there(page: str) -> None:
    known = {command.callback.__name__ for command in app.registered_commands if command.callback}
    for code in inline_code(page):
        words = code.split()
        if words[0] == "make" and len(words) > 1:
            subprocess.run(["make", "--dry-run", words[1]], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        if words[0] == "triton-diffusion" and len(words) > 1:
            assert words[1] in known, code


# docs/from-model-py.md: the model.py of before, and what it becomes.


def ask_by_the_old_names(place: Workplace, model: str, prompt: str, seed: int) -> Any:
    """A request as the clients of before send it; the picture: UINT8 [height, width, 3]."""
    inputs = []
    for name, kind, value in (
        ("PROMPT", "BYTES", np.array([[prompt]], object)),
        ("SEED", "INT64", np.array([[seed]], np.int64)),
        ("STEPS", "INT32", np.array([[4]], np.int32)),
    ):
        inputs.append(tritonclient.grpc.InferInput(name, [1, 1], kind))
        inputs[-1].set_data_from_numpy(value)
    with tritonclient.grpc.InferenceServerClient(place.server.grpc_url) as client:
        image = client.infer(model, inputs).as_numpy("IMAGE")
    return image.reshape(image.shape[-3:])


REQUESTS = [("a red circle", 7), ("a blue star", 8)]


@pytest.fixture(scope="module")
def before(workplace: Workplace) -> list[Any]:
    """The pictures of the old model.py."""
    return [ask_by_the_old_names(workplace, "before", prompt, seed) for prompt, seed in REQUESTS]


def test_the_pictures_are_those_of_the_old_model(workplace: Workplace, before: list[Any]) -> None:
    with DiffusionClient(workplace.server.grpc_url, "sd35") as client:
        for (prompt, seed), image in zip(REQUESTS, before, strict=True):
            (result,) = client.generate(prompt, SamplingParams(seed=seed, num_inference_steps=4))
            np.testing.assert_array_equal(np.asarray(result.raise_for_error().images[0]), image)
    assert not np.array_equal(*before)


def test_clients_that_cannot_change_get_them_by_the_old_names(workplace: Workplace, before: list[Any]) -> None:
    for (prompt, seed), image in zip(REQUESTS, before, strict=True):
        np.testing.assert_array_equal(ask_by_the_old_names(workplace, "sd35_old_names", prompt, seed), image)


def test_users_of_the_old_and_of_the_new_names_share_a_wave(workplace: Workplace) -> None:
    server = workplace.server
    with ThreadPoolExecutor() as users, DiffusionClient(server.grpc_url, "sd35") as client:
        with occupied(server, "sd35"):
            old = [users.submit(ask_by_the_old_names, workplace, "sd35_old_names", *request) for request in REQUESTS]
            new = users.submit(client.generate, "a green star", SamplingParams(seed=9, num_inference_steps=2))
            wait_for_waiting(server, "sd35", 3)
        assert all(user.result().shape == (64, 64, 3) for user in old)
        receipt = new.result()[0].raise_for_error().receipt
    assert receipt is not None
    assert receipt.wave_size == 3
