"""Takes OpenTelemetry spans as a collector does: OTLP over HTTP, protobuf."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from opentelemetry.proto.collector.trace.v1 import trace_service_pb2

# What vLLM's exporter needs beside --otlp-traces-endpoint. It sends at once, and not every 5 s.
ENVIRONMENT = [
    {"name": "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "value": "http/protobuf"},
    {"name": "OTEL_BSP_SCHEDULE_DELAY", "value": "50"},
]


class Span(NamedTuple):
    """A span, with its ids in hex and its times in ns since the epoch."""

    trace: str
    parent: str
    name: str
    begun: int
    ended: int
    attributes: dict[str, Any]


class Collector:
    """What has come so far."""

    def __init__(self) -> None:
        self.spans: list[Span] = []

    def of(self, trace: str) -> dict[str, list[Span]]:
        """Return the spans of one trace by their names."""
        found: dict[str, list[Span]] = {}
        for span in self.spans:
            if span.trace == trace:
                found.setdefault(span.name, []).append(span)
        return found


def url(port: int) -> str:
    """Return what engines of this machine are told with --otlp-traces-endpoint."""
    return f"http://127.0.0.1:{port}/v1/traces"


@contextmanager
def collecting(port: int) -> Iterator[Collector]:
    """Serve a collector until the block ends."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            return

        def do_POST(self) -> None:
            sent = trace_service_pb2.ExportTraceServiceRequest()
            sent.ParseFromString(self.rfile.read(int(self.headers["Content-Length"])))
            collector.spans.extend(_spans(sent))
            self.send_response(200)
            self.end_headers()

    with http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler) as server:
        collector = Collector()
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield collector
        finally:
            server.shutdown()


def _spans(sent: Any) -> Iterator[Span]:
    for resource in sent.resource_spans:
        for scope in resource.scope_spans:
            for one in scope.spans:
                attributes = {
                    field.key: getattr(field.value, field.value.WhichOneof("value"))
                    for field in one.attributes
                }
                yield Span(
                    one.trace_id.hex(), one.parent_span_id.hex(), one.name,
                    one.start_time_unix_nano, one.end_time_unix_nano, attributes,
                )  # fmt: skip
