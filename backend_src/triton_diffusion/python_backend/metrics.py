"""The engine's metrics on Triton's metrics endpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import triton_python_backend_utils as pb_utils

from triton_diffusion import device_memory
from triton_diffusion.metric import METRICS, MOST_KEYS, OTHER_KEYS, PREFIX
from triton_diffusion.observer import EngineObserver, EngineState, WaveStep
from triton_diffusion.outcome import outcome_of, reason_of
from triton_diffusion.output import DiffusionOutput
from triton_diffusion.pending import PendingRequest
from triton_diffusion.reply import Reply
from triton_diffusion.sampling_params_key import SamplingParamsKey


class EngineMetrics(EngineObserver):
    """Publishes what happens; a call to Triton takes about 15 us, and a gauge that has not changed none.

    A step costs four such calls at most, and one for each forward pass; they are made on the observers' own thread.
    """

    def __init__(self, model: str, instance: str) -> None:
        self._labels = {"model": model, "instance": instance}
        self._families = {
            name: pb_utils.MetricFamily(
                name=name, description=metric.description, kind=getattr(pb_utils.MetricFamily, metric.kind.upper())
            )
            for name, metric in METRICS.items()
        }
        self._series: dict[tuple[str, ...], Any] = {}
        self._gauges: dict[tuple[str, ...], int] = {}
        self._key_labels: dict[SamplingParamsKey, str] = {}
        self._last_wave_id = 0
        # A rate or a sum over nothing is no data; so everything is there, as 0, before the first request.
        for name, metric in METRICS.items():
            if not metric.labels:
                self._one(name.removeprefix(PREFIX))
        self._start_key(OTHER_KEYS)
        self._one("requests_total", outcome="completed", reason="")
        self._set_gauge("device_memory_peak_bytes", device_memory.peak_bytes())

    def engine_changed(self, state: EngineState) -> None:
        self._set_gauge("live_states", state.live_states)
        self._set_gauge("remaining_steps", state.remaining_steps)
        self._set_by_key("waiting_requests", state.waiting)
        self._set_by_key("running_requests", state.running)

    def request_started(self, pending: PendingRequest) -> None:
        self._one("admission_wait_seconds").observe(pending.timeline["waiting"].seconds)

    def wave_stepped(self, step: WaveStep) -> None:
        self._one("steps_total").increment(1)
        for rows in step.forward_rows:
            self._one("forward_rows").observe(rows)
        self._one("step_seconds").observe(step.seconds)
        if step.wave_id != self._last_wave_id:
            self._last_wave_id = step.wave_id
            self._one("wave_requests").observe(step.requests)

    def request_ended(self, pending: PendingRequest, output: DiffusionOutput | None) -> None:
        outcome = self._count(pending.reply)
        if outcome == "completed" and output is not None and output.output is not None:
            self._one("images_total").increment(len(output.output))
            self._one("pixels_total").increment(output.output.size // 3)
        if outcome in ("cancelled", "expired"):
            self._one("cancelled_steps_saved_total").increment(pending.steps_left)
        if not pending.has_started:
            self._one("admission_wait_seconds").observe(pending.timeline["waiting"].seconds)
        durations = pending.durations(output)
        for stage in ("encode", "decode"):
            if stage in durations:
                self._one(f"{stage}_seconds").observe(durations[stage])
        self._one("request_seconds").observe(pending.seconds)
        self._set_gauge("device_memory_peak_bytes", device_memory.peak_bytes())

    def request_refused(self, reply: Reply) -> None:
        self._count(reply)

    def _count(self, reply: Reply) -> str:
        outcome = outcome_of(reply.error)
        self._one("requests_total", outcome=outcome, reason=reason_of(reply.error)).increment(1)
        return outcome

    def _set_by_key(self, name: str, counts: Mapping[SamplingParamsKey, int]) -> None:
        by_label = {key: 0 for (known, *labels), value in self._gauges.items() if known == name for key in labels}
        for key, count in counts.items():
            label = self._key_label(key)
            by_label[label] = by_label.get(label, 0) + count
        for label, count in by_label.items():
            self._set_gauge(name, count, key=label)

    def _key_label(self, key: SamplingParamsKey) -> str:
        if key not in self._key_labels and len(self._key_labels) < MOST_KEYS:
            self._key_labels[key] = str(key)
            self._start_key(str(key))
        return self._key_labels.get(key, OTHER_KEYS)

    def _start_key(self, label: str) -> None:
        """Both gauges at once: a query that adds them finds nothing where one is missing."""
        for name in ("waiting_requests", "running_requests"):
            self._set_gauge(name, 0, key=label)

    def _set_gauge(self, name: str, value: int, **labels: str) -> None:
        series = (name, *labels.values())
        if self._gauges.get(series) != value:
            self._one(name, **labels).set(value)
            self._gauges[series] = value

    def _one(self, name: str, **labels: str) -> Any:
        """The metric with these labels beside those that all have; `name` without the prefix."""
        series = (name, *labels.values())
        if series not in self._series:
            name = PREFIX + name
            buckets = {"buckets": list(METRICS[name].buckets)} if METRICS[name].buckets else {}
            self._series[series] = self._families[name].Metric(labels={**self._labels, **labels}, **buckets)
        return self._series[series]
