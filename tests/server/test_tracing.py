"""A collector sees the stages of a request under the request's own trace."""

from __future__ import annotations

import itertools
import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http
from tritonclient.utils import InferenceServerException

from tests.server.conftest import TINY_DEFAULTS, wait_until
from tests.server.otlp_collector import OtlpCollector, ReceivedSpan
from tests.server.repository import add_model
from triton_diffusion.embedded import TritonServer
from triton_diffusion_client import DiffusionClient, Receipt

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
TRACEPARENT = f"00-{TRACE}-{SPAN}-01"
STAGES = ["waiting", "encode", "denoise", "decode", "answer"]


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory, checkpoint: Path) -> Path:
    path = tmp_path_factory.mktemp("traced")
    add_model(path, "tiny", checkpoint, max_wait_ms=0, default_sampling_params=TINY_DEFAULTS)
    return path


@pytest.fixture(scope="module")
def collector() -> Iterator[OtlpCollector]:
    with OtlpCollector() as collector, pytest.MonkeyPatch.context() as environment:
        environment.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
        environment.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
        yield collector


@pytest.fixture(scope="module")
def traced_server(repository: Path, collector: OtlpCollector) -> Iterator[TritonServer]:
    """Triton traces every request, and sends its own spans to the same collector."""
    settings = ["mode=opentelemetry", "rate=1", "level=TIMESTAMPS", f"opentelemetry,url={collector.url}/v1/traces"]
    settings += ["opentelemetry,resource=service.name=triton", "opentelemetry,bsp_schedule_delay=100"]
    arguments = [f"--trace-config={setting}" for setting in settings]
    with TritonServer(repository, arguments=arguments) as server:
        yield server


def spans_of(collector: OtlpCollector, root: ReceivedSpan) -> list[ReceivedSpan]:
    return sorted((span for span in collector.spans if span.parent_id == root.span_id), key=lambda span: span.began)


def wait_for_span(collector: OtlpCollector, **attributes: Any) -> ReceivedSpan:
    """Our span of the request with these attributes; its children were sent before it."""
    wanted = {f"triton_diffusion.{name}": value for name, value in attributes.items()}.items()

    def found() -> list[ReceivedSpan]:
        return [span for span in collector.spans if span.name == "diffusion" and wanted <= span.attributes.items()]

    wait_until(lambda: bool(found()), f"a span with {attributes}", timeout=30)
    return found()[0]


def test_the_stages_are_children_of_tritons_own_span(traced_server: TritonServer, collector: OtlpCollector) -> None:
    with DiffusionClient(traced_server.grpc_url, "tiny") as client:
        receipt = client.generate("a cat")[0].raise_for_error().receipt
    assert receipt is not None
    span = wait_for_span(collector, request_id=receipt.request_id)
    wait_until(lambda: any(one.span_id == span.parent_id for one in collector.spans), "Triton's span")
    (parent,) = [one for one in collector.spans if one.span_id == span.parent_id]
    assert (parent.service, parent.name, parent.trace_id) == ("triton", "tiny", span.trace_id)
    assert parent.attributes["triton.model_name"] == span.attributes["triton.model_name"] == "tiny"
    assert not span.is_error
    assert span.service == "triton-diffusion"
    said = {name: span.attributes[f"triton_diffusion.{name}"] for name in ("wave_id", "wave_size", "rows", "steps")}
    assert said == {name: getattr(receipt, name) for name in said}
    assert span.attributes["triton_diffusion.key"] == receipt.key
    assert span.attributes["triton_diffusion.outcome"] == "completed"

    stages = spans_of(collector, span)
    assert [stage.name for stage in stages] == STAGES
    ends = [span.began, *(time for stage in stages for time in (stage.began, stage.ended)), span.ended]
    # Two clocks are read one after the other; the stages follow each other, and none begins before the request.
    assert all(later >= earlier - 1_000_000 for earlier, later in itertools.pairwise(ends))
    milliseconds = {stage.name: (stage.ended - stage.began) / 1e6 for stage in stages}
    assert milliseconds["waiting"] == pytest.approx(receipt.queue_ms, abs=0.1)
    assert milliseconds["encode"] == pytest.approx(receipt.encode_ms, abs=0.1)
    assert milliseconds["denoise"] >= receipt.denoise_ms - 0.1


@pytest.mark.parametrize("triton", [tritonclient.grpc, tritonclient.http])
def test_a_request_is_in_the_trace_of_its_client(
    traced_server: TritonServer, collector: OtlpCollector, triton: Any
) -> None:
    receipt = infer(traced_server, triton, headers={"traceparent": TRACEPARENT})
    span = wait_for_span(collector, request_id=receipt.request_id)
    assert span.trace_id == TRACE
    if triton is tritonclient.http:  # of the gRPC calls, Triton 2.51 itself loses a few
        wait_until(lambda: any(one.span_id == span.parent_id for one in collector.spans), "Triton's span")


def test_a_refused_request_is_an_error_in_its_trace(traced_server: TritonServer, collector: OtlpCollector) -> None:
    with pytest.raises(InferenceServerException):
        infer(traced_server, parameters={"height": 17})
    span = wait_for_span(collector, outcome="refused", reason="field_value_error")
    assert span.is_error
    wait_until(lambda: any(one.span_id == span.parent_id for one in collector.spans), "Triton's span")


def test_a_clients_traceparent_without_tritons_tracing_and_a_collector_that_goes_away(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with OtlpCollector() as collector:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
        with TritonServer(repository) as server:
            requests = {
                "gRPC header": infer(server, headers={"traceparent": TRACEPARENT}),
                "HTTP header": infer(server, tritonclient.http, headers={"traceparent": TRACEPARENT}),
                "parameter": generate(server, {"traceparent": TRACEPARENT}),
            }
            for way, receipt in requests.items():
                span = wait_for_span(collector, request_id=receipt.request_id)
                assert (span.trace_id, span.parent_id) == (TRACE, SPAN), way
            untraced = wait_for_span(collector, request_id=infer(server).request_id)
            assert (untraced.parent_id, len(untraced.trace_id)) == ("", 32), "a trace of its own"
            collector.close()
            for _ in range(3):
                infer(server)


def infer(
    server: TritonServer,
    triton: Any = tritonclient.grpc,
    headers: dict[str, str] | None = None,
    parameters: dict[str, int] | None = None,
) -> Receipt:
    prompt = triton.InferInput("prompt", [1, 1], "BYTES")
    prompt.set_data_from_numpy(np.array([["a cat"]], object))
    url = server.grpc_url if triton is tritonclient.grpc else server.http_url
    with triton.InferenceServerClient(url) as connection:
        result = connection.infer("tiny", [prompt], headers=headers, parameters=parameters)
    return Receipt.from_json(result.as_numpy("receipt").item())


def generate(server: TritonServer, parameters: dict[str, str]) -> Receipt:
    """By Triton's generate endpoint, as curl would send it."""
    body = json.dumps({"prompt": "a cat", **parameters}).encode()
    request = urllib.request.Request(f"http://{server.http_url}/v2/models/tiny/generate", body)
    with urllib.request.urlopen(request) as response:
        return Receipt.from_json(json.load(response)["receipt"])
