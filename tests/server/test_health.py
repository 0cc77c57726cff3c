"""`triton-diffusion health`: healthy is who makes a picture, or says that it has no time for one."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import tritonclient.grpc
from typer.testing import CliRunner

from tests.families import BY_NAME
from tests.server.conftest import TINY_DEFAULTS, wait_for_running, wait_for_waiting
from tests.server.repository import add_model
from triton_diffusion.cli import app
from triton_diffusion.embedded import TritonServer


def health(*arguments: str) -> tuple[int, str]:
    """The exit code, and what is printed."""
    result = CliRunner().invoke(app, ["health", *arguments])
    return result.exit_code, result.output


@contextmanager
def long_requests(server: TritonServer, model: str, count: int) -> Iterator[None]:
    """So many requests of a thousand steps have reached the engine; at the end they are cancelled."""

    def ignore(result: object, error: object) -> None:
        """The answers are of no interest here."""

    prompt = tritonclient.grpc.InferInput("prompt", [1, 1], "BYTES")
    prompt.set_data_from_numpy(np.array([[b"a cat"]], np.object_))
    parameters = {"num_inference_steps": 1000, "num_images_per_prompt": 8, "height": 128, "width": 128}
    with tritonclient.grpc.InferenceServerClient(server.grpc_url) as client:

        def send() -> Any:
            return client.async_infer(model, [prompt], callback=ignore, parameters=parameters)

        under_way = [send()]
        wait_for_running(server, model, 1)  # before the others come, so that it takes no place in the queue
        under_way += [send() for _ in range(count - 1)]
        wait_for_waiting(server, model, count - 1)
        try:
            yield
        finally:
            for request in under_way:
                request.cancel()
            wait_for_running(server, model, 0)


@pytest.mark.parametrize("scheme", ["", "grpc://", "http://"])
def test_every_ready_model_makes_a_tiny_picture(server: TritonServer, scheme: str) -> None:
    address = server.http_url if scheme == "http://" else server.grpc_url
    code, output = health(f"{scheme}{address}", "--timeout", "120")
    assert code == 0, output
    names = ["faulty", "one_at_a_time", "pixart", "stepwise", "tiny"]
    assert [line.split(": ")[:2] for line in output.splitlines()] == [["healthy", name] for name in names]
    assert output.count("answered in") == len(names)


def test_a_full_queue_is_busy_and_not_ill(server: TritonServer) -> None:
    with long_requests(server, "one_at_a_time", count=3):  # one runs, two wait, and no more may wait
        code, output = health(server.grpc_url, "--model", "one_at_a_time", "--timeout", "120")
    assert code == 0
    assert output.startswith("healthy: one_at_a_time: busy (2 requests wait already (max_queue_size)")


def test_a_long_wave_is_busy_and_not_ill(server: TritonServer) -> None:
    with long_requests(server, "tiny", count=1):
        code, output = health(f"http://{server.http_url}", "--model", "tiny", "--timeout", "8")
    assert code == 0
    assert output.startswith("healthy: tiny: busy (the request's timeout of")


def test_a_python_process_that_hangs_or_died_is_unhealthy(tmp_path: Path, checkpoint: Path) -> None:
    for name in ("hangs", "dies"):
        add_model(tmp_path, name, checkpoint, max_wait_ms=0, default_sampling_params=TINY_DEFAULTS)
    with TritonServer(tmp_path) as server:
        for stub in psutil.Process(server.pid).children():
            stub.send_signal(signal.SIGSTOP if "hangs" in " ".join(stub.cmdline()) else signal.SIGKILL)
        hangs = health(server.grpc_url, "--model", "hangs", "--timeout", "3")
        code, output = health(server.grpc_url, "--model", "dies", "--timeout", "120")
        server.kill()  # such a server does not stop by itself
    assert hangs == (1, "unhealthy: hangs: no answer within 3 s, not even that it is busy\n")
    assert code == 1
    assert re.fullmatch(r"unhealthy: dies: .*Stub process.*\n", output), "one line"


def test_the_request_is_changed_to_what_the_model_takes(tmp_path: Path) -> None:
    """An image-to-image model gets an image, and the strength that leaves a step to take."""
    families = {"img2img": "StableDiffusion3Img2Img", "video": "Wan2.1"}
    for name, family in families.items():
        BY_NAME[family].build().save_pretrained(tmp_path / "checkpoints" / name)
        add_model(
            tmp_path / "repository",
            name,
            tmp_path / "checkpoints" / name,
            max_wait_ms=0,
            default_sampling_params=BY_NAME[family].common,
        )
    with TritonServer(tmp_path / "repository") as server:
        code, output = health(server.grpc_url, "--timeout", "200")
    assert code == 0, output
    assert output.count("answered in") == 2


def test_what_is_not_there_is_named(server: TritonServer) -> None:
    code, output = health(server.grpc_url, "--model", "tiy")
    assert code == 1
    assert output == (
        f"unhealthy: {server.grpc_url}: there is no model 'tiy'; "
        "ready are: faulty, one_at_a_time, pixart, stepwise, tiny\n"
    )
    for nobody in ("127.0.0.1:9", "http://127.0.0.1:9"):
        code, output = health(nobody, "--timeout", "20")
        assert code == 1
        assert output.startswith(f"unhealthy: {nobody}: ")
        assert output.count("\n") == 1, "one line"
    code, output = health("ftp://127.0.0.1:9")
    assert (code, output) == (1, "unhealthy: unknown transport 'ftp': use grpc:// or http://\n")
