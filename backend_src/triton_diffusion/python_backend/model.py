"""`TritonPythonModel`: what a model repository's model.py hands to Triton."""

from __future__ import annotations

import json
import logging
import os
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import triton_python_backend_utils as pb_utils

from triton_diffusion.errors import ConfigurationError, FieldValueError
from triton_diffusion.python_backend.logs import forward_logs
from triton_diffusion.python_backend.triton_outputs import OUTPUTS, check_outputs
from triton_diffusion.python_backend.triton_reply import TritonReply
from triton_diffusion.reply import Reply
from triton_diffusion.request import BATCH_KEY, FIELDS, OmniDiffusionRequest, parse_request, unique_request_id
from triton_diffusion.tracing import TRACE_CONTEXT, request_tracing, trace_context

if TYPE_CHECKING:
    from triton_diffusion.engine import DiffusionEngine

logger = logging.getLogger("triton_diffusion")

MICROSECONDS = 1e6


class TritonPythonModel:
    """Hands requests over to the engine, which answers each of them by itself.

    Two rules keep the server alive: nothing may be raised out of `execute`, and every request gets exactly one
    final answer, a forgotten one hangs its client and the shutdown.
    """

    @staticmethod
    def auto_complete_config(config: Any) -> Any:
        """Declare the inputs and outputs; everything else is config.pbtxt's."""
        for declared in FIELDS.values():
            entry = {"name": declared.name, "data_type": declared.triton_type, "dims": declared.dims}
            config.add_input(entry if declared.required else {**entry, "optional": True})
        config.add_input({"name": BATCH_KEY, "data_type": "TYPE_UINT8", "dims": [-1, -1, -1], "optional": True})
        for name, output in OUTPUTS.items():
            config.add_output({"name": name, "data_type": output.triton_type, "dims": output.dims})
        return config

    def initialize(self, args: dict[str, str]) -> None:
        """Load the pipeline and start the engine.

        Raises:
            ConfigurationError: Triton reports it as the reason why the model is unavailable.
        """
        # Triton imports this module in a second process as well, only to complete the configuration.
        from triton_diffusion.python_backend.metrics import EngineMetrics
        from triton_diffusion.serving import start_engine

        forward_logs(pb_utils.Logger)
        model, instance = args["model_name"], args["model_instance_name"]
        try:
            self.engine: DiffusionEngine = start_engine(
                json.loads(args["model_config"]),
                Path(args["model_repository"]) / args["model_version"],
                instance_kind=args["model_instance_kind"],
                device_id=int(args["model_instance_device_id"] or 0),
                observers=[EngineMetrics(model, instance), *request_tracing(model, instance, os.environ)],
            )
        except ConfigurationError as error:
            # Triton reports the traceback too; that of a wrong configuration helps nobody.
            raise ConfigurationError(str(error)) from None
        self.adapter = self.engine.runner.adapter

    def execute(self, requests: Sequence[Any]) -> None:
        """Parse, validate and hand over; the answers are sent later."""
        replies: list[TritonReply] = []
        try:
            replies += [TritonReply(request) for request in requests]
            self.engine.add_requests(self._admit(requests, replies))
        except Exception as error:
            logger.exception("requests could not be handed over")
            for reply in replies:
                self.engine.refuse(reply, error)

    def finalize(self) -> None:
        """Answer what is left, and stop."""
        self.engine.shutdown()

    def _admit(
        self, requests: Sequence[Any], replies: Sequence[TritonReply]
    ) -> list[tuple[OmniDiffusionRequest, Reply]]:
        """The requests that are valid; the others are answered here."""
        admitted: list[tuple[OmniDiffusionRequest, Reply]] = []
        for request, reply in zip(requests, replies, strict=True):
            try:
                admitted.append((self._parse(request, reply), reply))
            except Exception as error:
                self.engine.refuse(reply, error)
        return admitted

    def _parse(self, request: Any, reply: TritonReply) -> OmniDiffusionRequest:
        parameters = json.loads(request.parameters() or "{}")
        parameters = {name: value for name, value in parameters.items() if not name.startswith("triton_")}
        # Headers that Triton forwards come as parameters; HTTP/1 writes their names with a capital.
        names = [name for name in parameters if name.lower() in TRACE_CONTEXT]
        client_context = {name.lower(): str(parameters.pop(name)) for name in names}
        reply.trace_context = trace_context(reply.trace_context, client_context)
        # How /generate passes what other requests have fields for.
        generate_id = parameters.pop("id", "")
        timeout = request.timeout() or _microseconds(parameters.pop("timeout", 0))
        parsed = parse_request(
            {tensor.name(): tensor.as_numpy() for tensor in request.inputs() if tensor.name() != BATCH_KEY},
            parameters,
            request_id=unique_request_id(request.request_id() or str(generate_id)),
            pipeline=self.adapter.name,
            taken=self.adapter.taken,
            defaults=self.adapter.defaults,
            random_seed=lambda: secrets.randbelow(2**31),
            timeout=timeout / MICROSECONDS if timeout else None,
            is_cancelled=reply.is_cancelled,
        )
        self.adapter.check_request(parsed)
        check_outputs(reply.selected, self.adapter.raw_output)
        return parsed


def _microseconds(timeout: object) -> int:
    if not isinstance(timeout, int) or isinstance(timeout, bool) or timeout < 0:
        raise FieldValueError(f"timeout={timeout!r}: must be a whole number of microseconds")
    return timeout
