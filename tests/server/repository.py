"""The model repository that the server tests run on."""

from __future__ import annotations

import json
from pathlib import Path

MODEL = """\
from triton_diffusion.python_backend.model import TritonPythonModel

__all__ = ["TritonPythonModel"]
"""

# Faults that no client can cause, put where a client can ask for them by its prompt.
FAULTY_MODEL = """\
from triton_diffusion.python_backend.model import TritonPythonModel as Model


class TritonPythonModel(Model):
    def initialize(self, args):
        super().initialize(args)
        add_requests, execute = self.engine.add_requests, self.engine.runner.execute

        def faulty_add_requests(arrivals):
            if any(request.prompt == "fault in add_requests" for request, reply in arrivals):
                raise RuntimeError("fault in add_requests")
            add_requests(arrivals)

        def faulty_execute(batch):
            if "fault in the runner" in batch.prompts:
                raise RuntimeError("fault in the runner")
            return execute(batch)

        self.engine.add_requests = faulty_add_requests
        self.engine.runner.execute = faulty_execute

    def _parse(self, request, reply):
        parsed = super()._parse(request, reply)
        if parsed.prompt == "fault in parse":
            raise KeyError("fault in parse")
        if parsed.prompt == "fault in send":
            def fail(output, receipt):
                raise MemoryError("fault in send")
            reply.send_output = fail
        return parsed
"""


def add_model(
    repository: Path,
    name: str,
    checkpoint: Path,
    *,
    max_batch_size: int = 8,
    max_wait_ms: int = 200,
    model: str = MODEL,
    **parameters: object,
) -> None:
    """Write a model folder: config.pbtxt and 1/model.py."""
    folder = repository / name
    (folder / "1").mkdir(parents=True)
    (folder / "1" / "model.py").write_text(model)
    lines = [
        'backend: "python"',
        f"max_batch_size: {max_batch_size}",
        f"dynamic_batching {{ max_queue_delay_microseconds: {max_wait_ms * 1000} }}",
        "instance_group [ { kind: KIND_MODEL  count: 1 } ]",
    ]
    for key, value in {"model": str(checkpoint), **parameters}.items():
        text = value if isinstance(value, str) else json.dumps(value)
        lines.append(f'parameters {{ key: "{key}"  value {{ string_value: {json.dumps(text)} }} }}')
    (folder / "config.pbtxt").write_text("\n".join(lines) + "\n")
