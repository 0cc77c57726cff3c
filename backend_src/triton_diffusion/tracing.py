"""Whether requests are traced: OpenTelemetry's own environment variables say it."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping

from triton_diffusion.observer import EngineObserver

logger = logging.getLogger(__name__)

TRACE_CONTEXT = ("traceparent", "tracestate")
"""The names of the W3C Trace Context, as HTTP headers and as request parameters."""

TRACEPARENT = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}")


def trace_context(triton: Mapping[str, str], client: Mapping[str, str]) -> dict[str, str]:
    """Where the spans of a request belong: under Triton's span if that is in the client's trace, else in that.

    Triton 2.51 begins a trace of its own for a few of the gRPC calls that have one already.

    Args:
        triton: the context of Triton's span; empty if Triton does not trace the request.
        client: what came as a forwarded header or a request parameter; empty, or anything.
    """
    wanted = TRACEPARENT.fullmatch(client.get("traceparent", ""))
    found = TRACEPARENT.fullmatch(triton.get("traceparent", ""))
    if wanted is None or (found is not None and found[1] == wanted[1]):
        return dict(triton)
    return dict(client)


def request_tracing(model: str, instance: str, environment: Mapping[str, str]) -> list[EngineObserver]:
    """The observer that sends each request's stages to a collector; none, and nothing imported, if none is set.

    Args:
        environment: OTEL_EXPORTER_OTLP_ENDPOINT (or OTEL_EXPORTER_OTLP_TRACES_ENDPOINT) names the collector;
            OTEL_SDK_DISABLED=true and OTEL_TRACES_EXPORTER=none switch tracing off. OpenTelemetry itself reads the
            others: headers, sampler, service name, timeouts.
    """
    if not _is_wanted(environment):
        return []
    try:
        from triton_diffusion.request_tracer import RequestTracer
    except ImportError as error:
        logger.warning(
            "requests are not traced, though an OTLP endpoint is set: %s; install triton-diffusion[tracing]", error
        )
        return []
    return [RequestTracer(model, instance)]


def _is_wanted(environment: Mapping[str, str]) -> bool:
    if environment.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return False
    if environment.get("OTEL_TRACES_EXPORTER", "otlp") != "otlp":
        return False
    return any(environment.get(f"OTEL_EXPORTER_OTLP_{name}ENDPOINT") for name in ("", "TRACES_"))
