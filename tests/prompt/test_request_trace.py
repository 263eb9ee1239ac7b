"""Spans of requests, with the SDK's exporter to memory: their names, parents, times and attributes."""

import asyncio
import time
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("opentelemetry.sdk")

from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from ragkv import Engine
from ragkv.errors import InputError
from ragkv.retrieval import Document
from ragkv.retrieval.rag import Rag
from ragkv.runtime import run_in_thread, tracing
from tests.engine.helpers import A, B, Q, engine_of, text_engine

PARTS = {"ragkv.lookup", "ragkv.prefill", "ragkv.load", "ragkv.fuse", "ragkv.decode"}


@pytest.fixture
def exporter(monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    """Collects the spans of this test; afterwards no provider is set."""
    provider, exporter = TracerProvider(), InMemorySpanExporter()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", provider)
    return exporter


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with engine_of() as engine:
        engine.warm([A, B])
        yield engine


def by_name(exporter: InMemorySpanExporter) -> dict[str, Any]:
    spans = exporter.get_finished_spans()
    assert len({span.name for span in spans}) == len(spans)
    return {span.name: span for span in spans}


def test_a_request_has_a_span_with_its_report_and_one_for_each_part(
    engine: Engine, exporter: InMemorySpanExporter
) -> None:
    answer = engine.answer(Q, [A, B], max_new_tokens=4, min_new_tokens=4)
    spans = by_name(exporter)
    root = spans.pop("ragkv.request")
    assert spans.keys() == PARTS
    reuse = answer.reuse
    wanted = {"exact": reuse.exact, "fused": reuse.fused, "recomputed": reuse.recomputed, "computed": reuse.computed}
    assert {name: root.attributes[f"ragkv.{name}_tokens"] for name in wanted} == wanted
    assert root.attributes["ragkv.prompt_tokens"] == reuse.tokens and root.attributes["ragkv.answer_tokens"] == 4
    assert root.attributes["ragkv.selector"] == reuse.selector and root.attributes["ragkv.ratio"] == reuse.ratio
    assert root.attributes["ragkv.finish_reasons"] == ("length",)
    assert spans["ragkv.load"].attributes == {f"ragkv.bytes.{tier}": n for tier, n in reuse.bytes_by_tier.items()}
    for span in spans.values():
        assert span.parent.span_id == root.context.span_id
        assert root.start_time <= span.start_time <= span.end_time <= root.end_time + 10_000_000


def test_the_spans_are_as_long_as_the_report_says(engine: Engine, exporter: InMemorySpanExporter) -> None:
    timing = engine.answer(Q, [A, B], max_new_tokens=4, min_new_tokens=4).timing
    spans = by_name(exporter)
    for name, seconds in (("lookup", timing.lookup_s), ("load", timing.load_s), ("fuse", timing.fuse_s)):
        span = spans[f"ragkv.{name}"]
        assert (span.end_time - span.start_time) / 1e9 == pytest.approx(seconds, abs=1e-6)
    assert spans["ragkv.decode"].start_time >= spans["ragkv.prefill"].end_time


def test_the_callers_span_is_the_parent_also_from_a_task(engine: Engine, exporter: InMemorySpanExporter) -> None:
    tracer = trace.get_tracer("application")
    with tracer.start_as_current_span("caller") as caller:
        asyncio.run(run_in_thread(lambda cancel: engine.answer(Q, [A], max_new_tokens=2, cancel=cancel)))
    request = next(span for span in exporter.get_finished_spans() if span.name == "ragkv.request")
    assert request.parent.span_id == caller.get_span_context().span_id


def test_a_request_that_fails_is_marked_by_the_type_of_its_error_alone(
    engine: Engine, exporter: InMemorySpanExporter
) -> None:
    class SecretError(RuntimeError):
        pass

    def fail(_: Any) -> None:
        raise SecretError("the question was: who?")

    with pytest.raises(SecretError):
        engine.answer(Q, [A], on_prefill=fail)
    span = by_name(exporter)["ragkv.request"]
    assert span.attributes["error.type"] == "SecretError" and not span.status.is_ok
    assert "who" not in span.to_json() and not span.events


def test_a_stream_that_is_left_early_has_no_error(engine: Engine, exporter: InMemorySpanExporter) -> None:
    events = engine.stream(Q, [A], max_new_tokens=50, min_new_tokens=50)
    next(events)
    events.close()  # type: ignore[attr-defined]
    assert "error.type" not in by_name(exporter)["ragkv.request"].attributes


def test_a_prefill_has_no_decoding_and_a_refused_call_no_span(engine: Engine, exporter: InMemorySpanExporter) -> None:
    with pytest.raises(InputError):
        engine.answer(Q, [A], temperature=9.0)
    assert not exporter.get_finished_spans()
    engine.prefill(Q, [A])
    assert by_name(exporter).keys() == PARTS - {"ragkv.decode"} | {"ragkv.request"}


def test_a_question_over_a_corpus_is_one_trace_without_its_texts(exporter: InMemorySpanExporter) -> None:
    with text_engine() as engine, Rag(engine, None) as rag:
        rag.ingest([Document("harbour", "The harbour of Oro was built by Lena Moss.")])
        exporter.clear()
        rag.ask("Who built the harbour?", max_new_tokens=2)
    spans = by_name(exporter)
    assert spans.keys() == {"ragkv.ask", "ragkv.retrieve", "ragkv.request", *PARTS}
    for child in ("ragkv.retrieve", "ragkv.request"):
        assert spans[child].parent.span_id == spans["ragkv.ask"].context.span_id
    assert spans["ragkv.retrieve"].attributes == {"ragkv.k": 6, "ragkv.hits": 1}
    assert not any(word in span.to_json() for span in spans.values() for word in ("harbour", "Moss", "Oro"))


def test_without_a_provider_a_request_pays_for_one_look() -> None:
    assert tracing.tracer() is None and tracing.current() is None
    began = time.perf_counter()
    for _ in range(10_000):
        tracing.tracer()
    assert (time.perf_counter() - began) / 10_000 < 20e-6, "a look takes less than a hundredth of the shortest step"
