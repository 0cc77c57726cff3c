"""One tritonserver process: started, awaited, stopped, and nothing of it left behind."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType, TracebackType

import psutil

from triton_diffusion.embedded.installation import TritonInstallation
from triton_diffusion.embedded.ports import PortError, check_ports, free_ports
from triton_diffusion.embedded.server_log import ServerLog

STOP_FILE = "TRITON_DIFFUSION_STOP_FILE"
"""The environment variable with the path of a file that tells the engines to answer what is left."""

TRACE_CONTEXT_HEADERS = "(?i)^(traceparent|tracestate)$"
"""The headers that Triton hands to the model as request parameters, so that a client's trace goes on in it."""

ANSWER_SECONDS = 10.0
"""For unfinished requests to be answered with an error, after `exit_timeout`."""


class TritonServerError(RuntimeError):
    """The server did not start, or died; the message carries the server's own reason."""


class TritonServer:
    """A tritonserver serving `model_repository`; a context manager.

    Args:
        model_repository: the folder of models.
        host: the address to bind; only this machine can connect by default.
        http_port, grpc_port, metrics_port: None or 0 takes a free port.
        exit_timeout: seconds that running requests get to finish when the server stops.
        on_log_line: called with every line that the server prints.
        arguments: further command line arguments for tritonserver; they win over those that are given here.

    Raises:
        TritonNotFoundError: no tritonserver on this machine.
        TritonServerError: the server did not become ready.
    """

    def __init__(
        self,
        model_repository: Path | str,
        *,
        host: str = "127.0.0.1",
        http_port: int | None = None,
        grpc_port: int | None = None,
        metrics_port: int | None = None,
        exit_timeout: float = 30.0,
        on_log_line: Callable[[str], None] | None = None,
        arguments: Sequence[str] = (),
    ) -> None:
        self.model_repository = Path(model_repository).resolve()
        self.host = host
        free = iter(free_ports(3))
        self.http_port = http_port or next(free)
        self.grpc_port = grpc_port or next(free)
        self.metrics_port = metrics_port or next(free)
        self.exit_timeout = exit_timeout
        self.log = ServerLog(on_log_line)
        self._arguments = list(arguments)
        # Names of our own tell our server and its shared memory from others on this machine.
        unique = uuid.uuid4().hex[:12]
        self._id = f"triton-diffusion-{unique}"
        self.shared_memory_prefix = f"triton_diffusion_{unique}_"
        self._process: subprocess.Popen[str] | None = None
        self._scratch: tempfile.TemporaryDirectory[str] | None = None

    @property
    def log_lines(self) -> Sequence[str]:
        """The last lines that the server printed."""
        return list(self.log.lines)

    @property
    def http_url(self) -> str:
        return f"{self._reachable_host}:{self.http_port}"

    @property
    def grpc_url(self) -> str:
        return f"{self._reachable_host}:{self.grpc_port}"

    @property
    def metrics_url(self) -> str:
        return f"{self._reachable_host}:{self.metrics_port}"

    @property
    def pid(self) -> int:
        """The process id of tritonserver; it leads a process group that also holds the Python stubs."""
        assert self._process is not None, "the server was not started"
        return self._process.pid

    def __enter__(self) -> TritonServer:
        self._handle_signals()
        self.start()
        try:
            self.wait_until_ready()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _handle_signals(self) -> None:
        """Turn a termination of this process into an exception, so that the `with` block ends and stops the server."""
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGHUP):
                if signal.getsignal(number) is signal.SIG_DFL:
                    signal.signal(number, _exit)

    def start(self) -> None:
        """Start the process; `wait_until_ready` says when it can be used.

        Raises:
            TritonNotFoundError: no tritonserver on this machine.
            TritonServerError: no such repository, or a port is taken, which Triton itself finds out after it has
                loaded the models.
        """
        if not self.model_repository.is_dir():
            raise TritonServerError(f"the model repository {self.model_repository} is not a directory")
        installation = TritonInstallation.find()
        ports = {"--http-port": self.http_port, "--grpc-port": self.grpc_port, "--metrics-port": self.metrics_port}
        try:
            check_ports(self.host, ports)
        except PortError as error:
            raise TritonServerError(str(error)) from None
        self._scratch = tempfile.TemporaryDirectory(prefix="triton-diffusion-")
        backends = Path(self._scratch.name) / "backends"
        installation.link_backend_directory(backends)
        self._process = subprocess.Popen(
            [str(installation.executable), *self._command_line(backends)],
            env={**installation.environment(), STOP_FILE: str(self._stop_file)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,  # Ctrl-C reaches us, and we stop the server in order
        )
        assert self._process.stdout is not None
        self.log.read(self._process.stdout)

    def wait_until_ready(self, timeout: float | None = 600.0, on_wait: Callable[[float], None] | None = None) -> None:
        """Block until the server and each of its models answer that they are ready.

        Args:
            timeout: seconds; loading a large checkpoint takes minutes, and downloading it longer. None: as long as
                the process lives.
            on_wait: called about five times a second with the seconds waited, to show progress.

        Raises:
            TritonServerError: the process ended, or `timeout` passed.
        """
        began = time.monotonic()
        while not self._is_ready():
            waited = time.monotonic() - began
            if self.poll() is not None:
                raise TritonServerError(self.log.reason(f"tritonserver exited with code {self.poll()}"))
            if timeout is not None and waited > timeout:
                raise TritonServerError(self.log.reason(f"tritonserver was not ready after {timeout:.0f} s"))
            if on_wait is not None:
                on_wait(waited)
            time.sleep(0.2)

    def poll(self) -> int | None:
        """The server's exit code, or None while it runs."""
        return None if self._process is None else self._process.poll()

    def wait(self) -> str:
        """Block until the server ends by itself, or the Python process of a model dies; which of the two.

        Triton neither restarts that process nor answers the requests that it held, and still calls the model
        ready; so the server is of no use from then on, and is killed, which its clients notice.
        """
        dead_before: set[int] = set()
        while self.poll() is None:
            dead = self._dead_children()
            if dead & dead_before:  # at an orderly unload it is one for a moment, too
                self.kill()
                return "the Python process of a model died (killed for lack of memory?)"
            dead_before = dead
            time.sleep(0.5)
        return self.log.reason(f"tritonserver ended by itself with code {self.poll()}")

    def stop(self) -> None:
        """Let running requests finish (at most `exit_timeout` seconds), then end every process and clean up.

        Requests that are not finished by then are answered with an error.
        """
        if self._process is None:
            return
        try:
            if self._process.poll() is None:
                self._process.send_signal(signal.SIGTERM)
            if not self._ends_within(self.exit_timeout):
                self._stop_file.touch()
                self._ends_within(ANSWER_SECONDS)
        finally:
            self.kill()

    def kill(self) -> None:
        """End every process of the server at once and remove what it leaves in /dev/shm."""
        if self._process is None:
            return
        # A tritonserver that crashed leaves its stubs behind; they are in its process group.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self.log.finish(timeout=5)
        for region in Path("/dev/shm").glob(f"{self.shared_memory_prefix}*"):
            region.unlink(missing_ok=True)
        if self._scratch is not None:
            self._scratch.cleanup()
        self._process = None

    def _ends_within(self, seconds: float) -> bool:
        assert self._process is not None
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=seconds)
            return True
        return False

    def _dead_children(self) -> set[int]:
        dead = set()
        with contextlib.suppress(psutil.NoSuchProcess):
            for child in psutil.Process(self.pid).children():
                with contextlib.suppress(psutil.NoSuchProcess):
                    if child.status() == psutil.STATUS_ZOMBIE:
                        dead.add(child.pid)
        return dead

    @property
    def _stop_file(self) -> Path:
        """Tells the engines that their running requests are waited for no longer."""
        assert self._scratch is not None
        return Path(self._scratch.name) / "stop"

    @property
    def _reachable_host(self) -> str:
        return "127.0.0.1" if self.host in ("0.0.0.0", "::") else self.host

    def _command_line(self, backends: Path) -> list[str]:
        return [
            f"--id={self._id}",
            f"--model-repository={self.model_repository}",
            f"--backend-directory={backends}",
            f"--http-address={self.host}",
            f"--http-port={self.http_port}",
            f"--grpc-address={self.host}",
            f"--grpc-port={self.grpc_port}",
            f"--metrics-address={self.host}",
            f"--metrics-port={self.metrics_port}",
            f"--exit-timeout-secs={round(self.exit_timeout + ANSWER_SECONDS)}",
            f"--backend-config=python,shm-region-prefix-name={self.shared_memory_prefix}",
            f"--http-header-forward-pattern={TRACE_CONTEXT_HEADERS}",
            f"--grpc-header-forward-pattern={TRACE_CONTEXT_HEADERS}",
            *self._arguments,
        ]

    def _is_ready(self) -> bool:
        server = self._http("GET", "/v2")
        if server is None or self._id not in server.decode(errors="replace"):
            return False  # another server, which took the port in the meantime, may be ready
        if self._http("GET", "/v2/health/ready") is None:
            return False
        index = self._http("POST", "/v2/repository/index")
        if index is None:
            return False
        names = {entry["name"] for entry in json.loads(index) if entry.get("state")}
        return all(self._http("GET", f"/v2/models/{name}/ready") is not None for name in names)

    def _http(self, method: str, path: str) -> bytes | None:
        """The body of a 200 answer, else None."""
        request = urllib.request.Request(f"http://{self.http_url}{path}", method=method, data=None)
        try:
            with urllib.request.urlopen(request, timeout=5) as response:
                body: bytes = response.read()
                return body
        except (OSError, http.client.HTTPException):
            return None


def _exit(number: int, frame: FrameType | None) -> None:  # noqa: ARG001
    sys.exit(128 + number)
