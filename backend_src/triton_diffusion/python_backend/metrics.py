"""The engine's gauges and counters on Triton's metrics endpoint."""

from __future__ import annotations

from typing import Any

import triton_python_backend_utils as pb_utils

from triton_diffusion.engine import DiffusionEngine

_GAUGES = {
    "triton_diffusion_waiting_requests": "Requests that wait in the engine",
    "triton_diffusion_running_requests": "Requests that take denoising steps",
    "triton_diffusion_live_states": "Requests whose state the engine holds; 0 when it is idle",
    "triton_diffusion_remaining_steps": "Denoising steps that the live requests still have to take",
}
_STEPS = "triton_diffusion_steps_total"


class EngineMetrics:
    """Publishes the engine's state after each of its steps; what has not changed costs nothing."""

    def __init__(self, model: str, instance: str) -> None:
        labels = {"model": model, "instance": instance}
        self._families = {
            name: pb_utils.MetricFamily(name=name, description=text, kind=pb_utils.MetricFamily.GAUGE)
            for name, text in _GAUGES.items()
        }
        self._families[_STEPS] = pb_utils.MetricFamily(
            name=_STEPS, description="Fused denoising steps", kind=pb_utils.MetricFamily.COUNTER
        )
        self._metrics: dict[str, Any] = {name: family.Metric(labels=labels) for name, family in self._families.items()}
        self._published: dict[str, int] = {}

    def __call__(self, engine: DiffusionEngine) -> None:
        progress = engine.runner.progress().values()
        self._metrics[_STEPS].increment(engine.num_steps - self._published.get(_STEPS, 0))
        self._published[_STEPS] = engine.num_steps
        self._publish("triton_diffusion_waiting_requests", engine.scheduler.num_waiting)
        self._publish("triton_diffusion_running_requests", engine.scheduler.num_running)
        self._publish("triton_diffusion_live_states", engine.runner.num_live_states)
        self._publish("triton_diffusion_remaining_steps", sum(one.steps - one.step for one in progress))

    def _publish(self, name: str, value: int) -> None:
        if self._published.get(name) != value:
            self._metrics[name].set(value)
            self._published[name] = value
