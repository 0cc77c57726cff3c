"""The one final answer of a request."""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod

from triton_diffusion.errors import TritonDiffusionError, as_error
from triton_diffusion.output import DiffusionOutput
from triton_diffusion.receipt import Receipt

logger = logging.getLogger(__name__)


class Reply(ABC):
    """Sends a request's answer exactly once, whoever tries first; safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_answered = False
        self._error: TritonDiffusionError | None = None
        self.trace_context: dict[str, str] = {}
        """W3C Trace Context of the request (`traceparent`); empty if it is not traced."""

    @property
    def is_answered(self) -> bool:
        return self._is_answered

    @property
    def error(self) -> TritonDiffusionError | None:
        """What the request was answered with, instead of pictures."""
        return self._error

    def succeed(self, output: DiffusionOutput, receipt: Receipt) -> bool:
        """Answer with pictures. If they cannot be sent, the request is answered with the reason instead.

        Returns:
            Whether this is the answer; False if there was one before.
        """
        if not self._claim():
            return False
        try:
            self.send_output(output, receipt)
        except Exception as error:
            logger.exception("the answer of %s could not be sent", receipt.request_id)
            self._send_error_once(as_error(error))
        return True

    def fail(self, error: Exception) -> bool:
        """Answer with an error; whether this is the answer, as for `succeed`."""
        if not self._claim():
            return False
        self._send_error_once(as_error(error))
        return True

    @abstractmethod
    def send_output(self, output: DiffusionOutput, receipt: Receipt) -> None:
        """Send the pictures; raises if nothing was sent."""

    @abstractmethod
    def send_error(self, error: TritonDiffusionError) -> None:
        """Send the error."""

    def _claim(self) -> bool:
        with self._lock:
            claimed = not self._is_answered
            self._is_answered = True
            return claimed

    def _send_error_once(self, error: TritonDiffusionError) -> None:
        self._error = error
        try:
            self.send_error(error)
        except Exception:
            logger.exception("an error answer could not be sent: %s", error)
