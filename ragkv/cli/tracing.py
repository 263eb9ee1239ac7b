"""Traces of a command, if the environment asks for them in OpenTelemetry's variables (docs/traces.md)."""

import os
from importlib.metadata import entry_points
from typing import Any

from .output import print_note

VARIABLE = "OTEL_TRACES_EXPORTER"
_GROUP = "opentelemetry_traces_exporter"
_REGISTERED = {"otlp": ("otlp", "otlp_proto_http", "otlp_proto_grpc")}  # the names that exporters register


def start_tracing() -> None:
    """Set a tracer provider if `OTEL_TRACES_EXPORTER` names exporters. A note says what is missing."""
    wanted = [name.strip() for name in os.environ.get(VARIABLE, "none").split(",")]
    if wanted == ["none"]:
        return
    try:
        from opentelemetry import trace
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError:
        print_note(f"{VARIABLE} is set, but opentelemetry-sdk is not installed: no traces.")
        return
    provider = TracerProvider()  # reads the name of the service, the sampler and the limits from the environment
    for name in wanted:
        exporter = _exporter(name)
        if exporter is None:
            print_note(f"{VARIABLE} names {name!r}, but no installed package has this exporter: it gets no traces.")
        else:
            provider.add_span_processor(BatchSpanProcessor(exporter))
    trace.set_tracer_provider(provider)


def _exporter(name: str) -> Any | None:
    """The exporter of that name; `None` if no installed package has it."""
    for one in _REGISTERED.get(name, (name,)):
        for found in entry_points(group=_GROUP, name=one):
            return found.load()()
    return None
