"""`triton-diffusion serve` as a user starts it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import TracebackType


class Serving:
    """A running `triton-diffusion serve`; a context manager that ends it as Ctrl-C does.

    Args:
        arguments: of the command; every port is a free one.
        cwd: the current directory of the command.
        environment: further variables.
    """

    def __init__(self, *arguments: str | Path, cwd: Path | None = None, **environment: str) -> None:
        command = [sys.executable, "-m", "triton_diffusion.cli", "serve", *map(str, arguments)]
        command += ["--http-port", "0", "--grpc-port", "0", "--metrics-port", "0"]
        self.lines: list[str] = []
        self.began = time.monotonic()
        self.process = subprocess.Popen(
            command,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            cwd=cwd,
            env={**os.environ, **environment},
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __enter__(self) -> Serving:
        found = self.wait_for_line(r"ready: gRPC (\S+), HTTP (\S+), metrics (\S+)/metrics")
        self.seconds_to_ready = time.monotonic() - self.began
        self.grpc_url, self.http_url, self.metrics_url = found.groups()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.process.send_signal(signal.SIGINT)
        try:
            self.process.wait(timeout=120)
        finally:
            self.process.kill()
        self._reader.join(timeout=10)

    @property
    def log(self) -> str:
        return "\n".join(self.lines)

    def wait_for_end(self, timeout: float = 600) -> str:
        """The last line of a command that ends by itself."""
        self.process.wait(timeout)
        self._reader.join(timeout)
        return self.lines[-1]

    def wait_for_line(self, pattern: str, timeout: float = 600) -> re.Match[str]:
        """The first line that matches; the whole log if the command ends without one."""
        deadline = time.monotonic() + timeout
        position = 0
        while time.monotonic() < deadline:
            ended = self.process.poll() is not None and not self._reader.is_alive()
            for line in self.lines[position:]:
                position += 1
                if found := re.search(pattern, line):
                    return found
            assert not ended, self.log
            time.sleep(0.05)
        raise AssertionError(self.log)

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line.rstrip("\n"))
