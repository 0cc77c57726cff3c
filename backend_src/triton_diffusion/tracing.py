"""Whether requests are traced: OpenTelemetry's own environment variables say it."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from triton_diffusion.observer import EngineObserver

logger = logging.getLogger(__name__)

TRACE_CONTEXT = ("traceparent", "tracestate")
"""The names of the W3C Trace Context, as HTTP headers and as request parameters."""


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
