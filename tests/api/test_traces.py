"""Traces through the server: the trace of the caller goes on, and no span holds a text or a name of the caller's."""

import pytest

pytest.importorskip("opentelemetry.sdk")

from fastapi.testclient import TestClient
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from .helpers import filled

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.fixture
def exporter(monkeypatch: pytest.MonkeyPatch, client: TestClient) -> InMemorySpanExporter:
    """Collects the spans of requests after the fixtures of the test."""
    filled(client, "facts")
    provider, exporter = TracerProvider(), InMemorySpanExporter()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", provider)
    return exporter


@pytest.mark.parametrize("stream", [False, True])
def test_a_question_is_part_of_the_callers_trace(
    client: TestClient, exporter: InMemorySpanExporter, stream: bool
) -> None:
    body = {"question": "Who built the mill of Oro?", "collection": "facts", "stream": stream}
    assert client.post("/v1/ask", json=body, headers={"traceparent": f"00-{TRACE}-{SPAN}-01"}).status_code == 200
    every = exporter.get_finished_spans()
    spans = {span.name: span for span in every}
    assert len(spans) == len(every)
    parts = ("lookup", "prefill", "load", "fuse", "decode")
    assert spans.keys() == {"POST /v1/ask", "ragkv.retrieve", "ragkv.request", *(f"ragkv.{part}" for part in parts)}
    assert {format(span.context.trace_id, "032x") for span in spans.values()} == {TRACE}
    served = spans["POST /v1/ask"]
    assert format(served.parent.span_id, "016x") == SPAN and served.kind is trace.SpanKind.SERVER
    assert served.attributes["http.response.status_code"] == 200
    for name in ("ragkv.retrieve", "ragkv.request"):
        assert spans[name].parent.span_id == served.context.span_id
    assert not any(word in span.to_json() for span in every for word in ("mill", "Oro", "facts"))


def test_a_span_is_named_by_the_route_and_not_by_the_path(client: TestClient, exporter: InMemorySpanExporter) -> None:
    assert client.get("/v1/collections/secret/documents").status_code == 404
    (span,) = exporter.get_finished_spans()
    assert span.name == "GET /v1/collections/{name}/documents" and "secret" not in span.to_json()
