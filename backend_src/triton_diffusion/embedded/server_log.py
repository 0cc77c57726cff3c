"""What a tritonserver prints."""

from __future__ import annotations

import contextlib
import re
import threading
from collections import deque
from collections.abc import Callable
from typing import IO

_ERROR_LINE = re.compile(r"^[EF]\d{4} .*?\] \"?(?P<message>.*?)\"?$")


class ServerLog:
    """Reads the server's output on a thread of its own, so that the server never waits for a full pipe.

    Args:
        on_line: called with every line.
    """

    def __init__(self, on_line: Callable[[str], None] | None = None) -> None:
        self.lines: deque[str] = deque(maxlen=10_000)
        self._on_line = on_line
        self._reader: threading.Thread | None = None

    def read(self, output: IO[str]) -> None:
        """Begin to read."""
        self._reader = threading.Thread(target=self._read, args=(output,), name="tritonserver-log", daemon=True)
        self._reader.start()

    def finish(self, timeout: float) -> None:
        """Wait until the output of a server that ended is read, at most `timeout` seconds."""
        if self._reader is not None:
            self._reader.join(timeout)

    def reason(self, what: str) -> str:
        """`what`, with the errors that the server logged; its last lines if there are none."""
        self.finish(timeout=1)
        lines = list(self.lines)
        errors = [match["message"] for match in map(_ERROR_LINE.match, lines) if match]
        failures = [message for message in errors if message.startswith("failed to ")]
        # The server appends the place in the backend's source, after this mark.
        shown = [message.split("\\n\\nAt:")[0] for message in failures or errors or _without_usage(lines)[-20:]]
        # Triton lists the GPUs that there are, if there are any.
        shown = [
            f"{line.rstrip()} none: no GPU was found" if line.rstrip().endswith("are:") else line for line in shown
        ]
        return "\n".join([what, *shown])

    def _read(self, output: IO[str]) -> None:
        for line in output:
            self.lines.append(line.rstrip("\n"))
            # Whatever happens there, the rest must be read.
            with contextlib.suppress(Exception):
                if self._on_line is not None:
                    self._on_line(line.rstrip("\n"))


def _without_usage(lines: list[str]) -> list[str]:
    """Of a wrong option, Triton says what is wrong before or after all of its options."""
    usage = next((place for place, line in enumerate(lines) if line.startswith("Usage: tritonserver")), None)
    if usage is None:
        return lines
    after = [line for line in lines[usage:] if line and not line.startswith(("\t", " ", "Usage"))]
    return [*lines[:usage], *after[-1:]]
