"""Python's logging, written into Triton's log."""

from __future__ import annotations

import logging
from typing import Any


class TritonLogHandler(logging.Handler):
    """Forwards log records to `pb_utils.Logger`, which exists only inside Triton."""

    def __init__(self, triton_logger: Any) -> None:
        super().__init__()
        self._triton_logger = triton_logger

    def emit(self, record: logging.LogRecord) -> None:
        message = self.format(record)
        if record.levelno >= logging.ERROR:
            self._triton_logger.log_error(message)
        elif record.levelno >= logging.WARNING:
            self._triton_logger.log_warn(message)
        else:
            self._triton_logger.log_info(message)


def forward_logs(triton_logger: Any) -> None:
    """Send the package's log records from INFO upwards to Triton's log."""
    package = logging.getLogger("triton_diffusion")
    package.setLevel(logging.INFO)
    package.propagate = False
    package.handlers = [TritonLogHandler(triton_logger)]
