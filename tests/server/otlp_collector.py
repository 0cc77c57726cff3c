"""An OpenTelemetry collector that keeps what it gets: OTLP by HTTP, as protobuf (ours) or as JSON (Triton's)."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, NamedTuple

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


class ReceivedSpan(NamedTuple):
    """A span as any collector would show it; ids in hexadecimal, times in nanoseconds since 1970."""

    service: str
    name: str
    trace_id: str
    span_id: str
    parent_id: str
    began: int
    ended: int
    attributes: dict[str, Any]
    is_error: bool


class OtlpCollector:
    """A context manager; `spans` are those received so far."""

    def __init__(self) -> None:
        self.spans: list[ReceivedSpan] = []
        spans = self.spans

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                read = {"application/json": from_json, "application/x-protobuf": from_protobuf}
                spans.extend(read[self.headers["Content-Type"]](body))
                self.send_response(200)
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> OtlpCollector:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Answer no more."""
        self._server.shutdown()
        self._server.server_close()


def from_protobuf(body: bytes) -> list[ReceivedSpan]:
    return [
        ReceivedSpan(
            service=next(one.value.string_value for one in resource.resource.attributes if one.key == "service.name"),
            name=span.name,
            trace_id=span.trace_id.hex(),
            span_id=span.span_id.hex(),
            parent_id=span.parent_span_id.hex(),
            began=span.start_time_unix_nano,
            ended=span.end_time_unix_nano,
            attributes={one.key: getattr(one.value, one.value.WhichOneof("value")) for one in span.attributes},
            is_error=span.status.code == span.status.STATUS_CODE_ERROR,
        )
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans
        for scope in resource.scope_spans
        for span in scope.spans
    ]


def from_json(body: bytes) -> list[ReceivedSpan]:
    return [
        ReceivedSpan(
            service=next(
                one["value"]["stringValue"]
                for one in resource["resource"]["attributes"]
                if one["key"] == "service.name"
            ),
            name=span["name"],
            trace_id=span["traceId"],
            span_id=span["spanId"],
            parent_id=span.get("parentSpanId", ""),
            began=int(span["startTimeUnixNano"]),
            ended=int(span["endTimeUnixNano"]),
            attributes={one["key"]: next(iter(one["value"].values())) for one in span.get("attributes", [])},
            is_error=span.get("status", {}).get("code") == 2,
        )
        for resource in json.loads(body)["resourceSpans"]
        for scope in resource["scopeSpans"]
        for span in scope["spans"]
    ]
