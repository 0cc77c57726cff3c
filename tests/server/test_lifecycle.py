"""Starting and stopping: everyone is answered, and nothing is left in the process table or in /dev/shm."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import tritonclient.http

from tests.server.conftest import PATIENCE, TINY_DEFAULTS, Measured, metric, wait_until
from tests.server.repository import add_model
from triton_diffusion.embedded import TritonServer, TritonServerError
from triton_diffusion_client import DiffusionClient, GenerationResult, SamplingParams, ServerUnavailableError


@pytest.fixture
def repository(tmp_path: Path, checkpoint: Path) -> Path:
    path = tmp_path / "repository"
    add_model(path, "tiny", checkpoint, max_wait_ms=0, default_sampling_params=TINY_DEFAULTS)
    return path


def shared_memory(prefix: str) -> list[str]:
    """What the server of that prefix has in /dev/shm; other servers may come and go."""
    return [name for name in os.listdir("/dev/shm") if name.startswith(prefix)]


def wait_for_the_end(server_pid: int) -> None:
    """Until nothing of the server is alive; a process that was killed may take a moment to go."""
    wait_until(lambda: processes(server_pid) == [], "the end of all processes of the server")


def processes(server_pid: int) -> list[int]:
    """Tritonserver and its stubs: all that is alive of its process group."""
    alive = []
    for process in psutil.process_iter():
        try:
            if os.getpgid(process.pid) == server_pid and process.status() != psutil.STATUS_ZOMBIE:
                alive.append(process.pid)
        except (ProcessLookupError, psutil.NoSuchProcess):
            pass
    return alive


def wait_for_requests(server: Measured, count: int) -> None:
    """Until so many have reached the engine; how many of them share its first wave is a matter of timing."""
    names = ("triton_diffusion_running_requests", "triton_diffusion_waiting_requests")
    wait_until(lambda: sum(metric(server, "tiny", name) for name in names) == count, f"{count} requests in the engine")


class InFlight:
    """Requests that are under way while the test does something to the server."""

    def __init__(self, server: TritonServer, count: int, steps: int) -> None:
        self._results: list[GenerationResult] = []

        def send() -> None:
            with DiffusionClient(server.grpc_url, "tiny") as client:
                self._results = client.generate(["a cat"] * count, SamplingParams(num_inference_steps=steps))

        self._thread = threading.Thread(target=send)
        self._thread.start()
        wait_for_requests(server, count)

    def results(self) -> list[GenerationResult]:
        self._thread.join(timeout=PATIENCE)
        assert not self._thread.is_alive(), "a request was never answered"
        return self._results


def test_at_unload_and_at_sigterm_running_requests_are_answered_and_nothing_is_left(repository: Path) -> None:
    arguments = ["--model-control-mode=explicit", "--load-model=tiny"]
    with TritonServer(repository, exit_timeout=PATIENCE, arguments=arguments) as server:
        pid = server.pid
        with closing(tritonclient.http.InferenceServerClient(server.http_url, network_timeout=PATIENCE)) as control:
            under_way = InFlight(server, count=12, steps=100)
            control.unload_model("tiny")
            assert [result.error for result in under_way.results()] == [None] * 12
            control.load_model("tiny")
        under_way = InFlight(server, count=12, steps=100)
        assert len(processes(pid)) >= 2
    assert [result.error for result in under_way.results()] == [None] * 12
    wait_for_the_end(pid)
    assert shared_memory(server.shared_memory_prefix) == []


def test_requests_that_outlast_the_exit_timeout_are_answered_with_an_error(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Unloading may take long on a slow machine; that must not be mistaken for a server that hangs.
    monkeypatch.setattr("triton_diffusion.embedded.server.ANSWER_SECONDS", PATIENCE)
    with TritonServer(repository, exit_timeout=0.1) as server:
        pid = server.pid
        under_way = InFlight(server, count=12, steps=1000)
    messages = [str(result.error) for result in under_way.results()]
    assert messages == ["the server is shutting down"] * 12
    assert any("successfully unloaded 'tiny'" in line for line in server.log_lines), "it ended by itself"
    wait_for_the_end(pid)


WITH_SERVER = """\
import sys
from triton_diffusion.embedded import TritonServer
with TritonServer(sys.argv[1]) as server:
    print(server.pid, server.shared_memory_prefix, flush=True)
    sys.stdin.read()
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_program_that_is_terminated_stops_its_server(repository: Path, number: signal.Signals) -> None:
    command = [sys.executable, "-c", WITH_SERVER, str(repository)]
    program = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert program.stdout is not None
    pid, prefix = program.stdout.readline().split()
    assert shared_memory(prefix) != []
    program.send_signal(number)
    assert program.wait(timeout=PATIENCE) != 0
    wait_for_the_end(int(pid))
    assert shared_memory(prefix) == []


def test_a_log_that_nobody_reads_does_not_stop_the_server(repository: Path) -> None:
    def broken(_: str) -> None:
        raise BrokenPipeError

    with TritonServer(repository, on_log_line=broken) as server, DiffusionClient(server.grpc_url, "tiny") as client:
        results = client.generate(["a cat"] * 400, SamplingParams(num_inference_steps=1, height=16, width=16))
    assert all(result.error is None for result in results)


def test_nothing_is_left_of_a_server_that_was_killed(repository: Path) -> None:
    with TritonServer(repository) as server:
        pid = server.pid
        os.kill(pid, signal.SIGKILL)
    wait_for_the_end(pid)
    assert shared_memory(server.shared_memory_prefix) == []


def test_a_model_that_cannot_be_loaded_is_explained(repository: Path, checkpoint: Path) -> None:
    add_model(repository, "misspelt", checkpoint, dtyp="float32")
    server = TritonServer(repository)
    with pytest.raises(TritonServerError) as failed, server:
        pass
    reason = str(failed.value)
    assert "failed to load 'misspelt' version 1" in reason
    assert "config.pbtxt: unknown parameter 'dtyp', did you mean 'dtype'?" in reason
    assert ".py(" not in reason, "the way through our source helps nobody here"
    assert shared_memory(server.shared_memory_prefix) == []


@dataclass
class Served:
    """`triton-diffusion serve` as a user starts it, and the addresses that it prints."""

    process: subprocess.Popen[str]
    grpc_url: str
    metrics_url: str

    @property
    def server(self) -> psutil.Process:
        (server,) = psutil.Process(self.process.pid).children()
        return server


@pytest.fixture
def served(repository: Path) -> Iterator[Served]:
    command = [sys.executable, "-m", "triton_diffusion.cli", "serve", str(repository)]
    command += ["--http-port", "0", "--grpc-port", "0", "--metrics-port", "0"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)
    assert process.stderr is not None
    lines = []
    for line in process.stderr:
        lines.append(line)
        if found := re.search(r"ready: gRPC (\S+), HTTP \S+, metrics (\S+)/metrics", line):
            break
    else:
        raise AssertionError("".join(lines))
    yield Served(process, grpc_url=found[1], metrics_url=found[2])
    process.kill()
    process.wait()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_serve_and_generate_by_the_command_line(served: Served, number: signal.Signals, tmp_path: Path) -> None:
    process, server = served.process, served.server
    command = [sys.executable, "-m", "triton_diffusion.cli", "generate", "a cat", "", "a dog", "--model", "tiny"]
    command += ["--url", served.grpc_url, "--seed", "7", "--steps", "3", "-n", "2"]
    command += ["--out", str(tmp_path / "pictures")]
    generated = subprocess.run(command, capture_output=True, text=True)
    assert generated.returncode == 1, "one of the prompts was empty"
    assert "error '': prompt='' has 0 characters" in generated.stderr
    names = ["1-a-cat-seed7.png", "1-a-cat-seed8.png", "3-a-dog-seed7.png", "3-a-dog-seed8.png"]
    assert sorted(path.name for path in (tmp_path / "pictures").iterdir()) == names

    process.send_signal(number)
    _, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0
    assert "stopping" in errors
    assert "successfully unloaded 'tiny'" in errors, "it ended by itself"
    wait_for_the_end(server.pid)


def test_serve_without_a_repository_is_one_line() -> None:
    command = [sys.executable, "-m", "triton_diffusion.cli", "serve", "nowhere"]
    served = subprocess.run(command, capture_output=True, text=True)
    assert served.returncode == 1
    assert re.fullmatch(r"error: nowhere: there is no such directory, and it is no hub id .*\n", served.stderr)


def test_serve_ends_when_the_python_process_of_a_model_dies(served: Served) -> None:
    # Triton would leave the clients of that process waiting for ever.
    process, server = served.process, served.server
    results: list[GenerationResult] = []

    def send() -> None:
        with DiffusionClient(served.grpc_url, "tiny") as client:
            results.extend(client.generate(["a cat", "a dog"], SamplingParams(num_inference_steps=1000)))

    client = threading.Thread(target=send)
    client.start()
    wait_for_requests(served, 2)
    (stub,) = server.children()
    stub.kill()
    client.join(timeout=PATIENCE)
    assert [type(result.error) for result in results] == [ServerUnavailableError] * 2
    assert process.wait(timeout=PATIENCE) == 1
    assert process.stderr is not None
    assert "the Python process of a model died" in process.stderr.read()
    wait_for_the_end(server.pid)
