"""Tracing is on when OpenTelemetry's environment variables say so; off, it imports nothing."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from triton_diffusion.tracing import trace_context

CLIENT, TRITON, OTHER = (
    f"00-{trace * 16}-{span * 8}-01" for trace, span in (("a1", "c1"), ("a1", "c2"), ("b3", "c3"))
)
ENDPOINT = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9"}
SCRIPT = """
import logging, os, sys
{before}
logging.basicConfig(level=logging.WARNING)
from triton_diffusion.tracing import request_tracing
observers = request_tracing("model", "instance", os.environ)
print([type(one).__name__ for one in observers], any(name.startswith("opentelemetry") for name in sys.modules))
"""


def run(environment: dict[str, str], before: str = "") -> tuple[str, str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("OTEL_")}
    command = [sys.executable, "-c", SCRIPT.format(before=before)]
    done = subprocess.run(command, env={**clean, **environment}, capture_output=True, text=True, check=True)
    return done.stdout.strip(), done.stderr


@pytest.mark.parametrize(
    "environment",
    [{}, {**ENDPOINT, "OTEL_SDK_DISABLED": "true"}, {**ENDPOINT, "OTEL_TRACES_EXPORTER": "none"}],
)
def test_off_costs_no_import(environment: dict[str, str]) -> None:
    assert run(environment) == ("[] False", "")


@pytest.mark.parametrize("variable", ["OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"])
def test_on_with_an_endpoint(variable: str) -> None:
    assert run({variable: "http://127.0.0.1:9"})[0] == "['RequestTracer'] True"


def test_a_missing_package_is_named() -> None:
    found, log = run(ENDPOINT, before="sys.modules['opentelemetry'] = None")
    assert found.startswith("[]")
    assert "install triton-diffusion[tracing]" in log


@pytest.mark.parametrize(
    ("triton", "client", "expected"),
    [
        ("", "", ""),
        (TRITON, "", TRITON),
        ("", CLIENT, CLIENT),
        (TRITON, CLIENT, TRITON),  # the nearer span of the same trace
        (OTHER, CLIENT, CLIENT),  # Triton began a trace of its own
        (TRITON, "no traceparent", TRITON),
    ],
)
def test_the_trace_that_a_request_belongs_to(triton: str, client: str, expected: str) -> None:
    found = trace_context({"traceparent": triton} if triton else {}, {"traceparent": client} if client else {})
    assert found.get("traceparent", "") == expected
