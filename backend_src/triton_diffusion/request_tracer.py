"""The stages of each request as OpenTelemetry spans, under the request's own trace."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, OTELResourceDetector, Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span, Status, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue

from triton_diffusion.observer import EngineObserver
from triton_diffusion.outcome import outcome_of, reason_of
from triton_diffusion.output import DiffusionOutput
from triton_diffusion.pending import PendingRequest
from triton_diffusion.reply import Reply

PREFIX = "triton_diffusion."
NANOSECONDS = 1e9

CLOSE_SECONDS = 3.0
"""For the last spans to be sent, when the model is unloaded."""


class RequestTracer(EngineObserver):
    """A span for each request, with a child for each stage, when the request has ended.

    Args:
        model, instance: of Triton.
        processor: where the spans go; by default to the OTLP endpoint of OpenTelemetry's environment variables.
    """

    def __init__(self, model: str, instance: str, processor: SpanProcessor | None = None) -> None:
        # A service name from the environment counts before ours.
        resource = Resource.create({SERVICE_NAME: "triton-diffusion"}).merge(OTELResourceDetector().detect())
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(processor or BatchSpanProcessor(OTLPSpanExporter()))
        self._tracer = self._provider.get_tracer("triton_diffusion")
        self._served: dict[str, AttributeValue] = {
            "triton.model_name": model,  # as Triton's own spans have it
            f"{PREFIX}instance": instance,
        }

    def request_ended(self, pending: PendingRequest, output: DiffusionOutput | None) -> None:
        # The clock of the spans is not that of the engine, which never goes back.
        epoch = time.time() - time.monotonic()
        steps = len(pending.rows_per_step) if output is None else output.num_inference_steps
        span = self._start(
            pending.reply,
            epoch + pending.request.arrival_time,
            {
                "request_id": pending.request.request_id,
                "key": str(pending.key),
                "joined_at_wave": pending.joined_at_wave,
                "wave_id": pending.wave_id,
                "wave_size": pending.wave_size,
                "rows": max(pending.rows_per_step, default=0),
                "steps": steps,
            },
        )
        context = set_span_in_context(span)
        for name, stage in pending.timeline.items():
            # A decoder that takes turns with the others' steps works for less time than it takes.
            child = self._span(name, context, epoch + stage.began, {"seconds": stage.seconds})
            child.end(_nanoseconds(epoch + stage.ended))
        span.end(_nanoseconds(epoch + pending.answered))

    def request_refused(self, reply: Reply) -> None:
        self._start(reply, time.time(), {}).end()

    def close(self) -> None:
        # It sends what is left; a collector that is not there must not hold up the unloading of the model.
        shutdown = threading.Thread(target=self._provider.shutdown, daemon=True)
        shutdown.start()
        shutdown.join(CLOSE_SECONDS)

    def _start(self, reply: Reply, began: float, attributes: Mapping[str, AttributeValue]) -> Span:
        parent = TraceContextTextMapPropagator().extract(reply.trace_context)
        ended = {"outcome": outcome_of(reply.error), "reason": reason_of(reply.error)}
        span = self._span("diffusion", parent, began, {**attributes, **ended})
        span.set_attributes(self._served)
        if reply.error is not None:
            # Not the message: it may hold a part of the prompt.
            span.set_status(Status(StatusCode.ERROR, ended["reason"]))
        return span

    def _span(self, name: str, parent: Context, began: float, attributes: Mapping[str, AttributeValue]) -> Span:
        return self._tracer.start_span(
            name,
            parent,
            start_time=_nanoseconds(began),
            attributes={PREFIX + key: value for key, value in attributes.items()},
        )


def _nanoseconds(seconds: float) -> int:
    return int(seconds * NANOSECONDS)
