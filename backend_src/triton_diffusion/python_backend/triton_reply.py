"""A reply through Triton's response sender."""

from __future__ import annotations

import json
from typing import Any

import triton_python_backend_utils as pb_utils

from triton_diffusion.errors import TritonDiffusionError
from triton_diffusion.output import DiffusionOutput
from triton_diffusion.python_backend.triton_outputs import make_outputs, select_outputs
from triton_diffusion.receipt import Receipt
from triton_diffusion.reply import Reply


class TritonReply(Reply):
    """Keeps the response sender, never the request: a kept request pins its shared memory."""

    def __init__(self, request: Any) -> None:
        super().__init__()
        self._sender = request.get_response_sender()
        self.trace_context = json.loads(request.trace().get_context() or "{}")
        self.selected = select_outputs(set(request.requested_output_names()))

    def is_cancelled(self) -> bool:
        """Whether the client cancelled, or its connection is gone (gRPC only)."""
        return not self.is_answered and bool(self._sender.is_cancelled())

    def send_output(self, output: DiffusionOutput, receipt: Receipt) -> None:
        tensors = make_outputs(self.selected, output, receipt)
        self._send(pb_utils.InferenceResponse([pb_utils.Tensor(name, tensor) for name, tensor in tensors.items()]))

    def send_error(self, error: TritonDiffusionError) -> None:
        code = getattr(pb_utils.TritonError, error.code)
        self._send(pb_utils.InferenceResponse(error=pb_utils.TritonError(str(error), code)))

    def _send(self, response: Any) -> None:
        self._sender.send(response, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
