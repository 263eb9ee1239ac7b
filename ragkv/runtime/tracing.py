"""Spans of OpenTelemetry, where the application has set a tracer provider (docs/traces.md).

Nothing of OpenTelemetry is imported here unless the application has imported it: without that it cannot have set a
provider. Without a provider a span costs one look into `sys.modules`. Exceptions are recorded by their type alone,
because their texts may hold parts of a prompt.
"""

import importlib
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

TRACE_HEADERS = ("traceparent", "tracestate")  # `TRACE_HEADERS` are those of the W3C's Trace Context.


def tracer() -> Any | None:
    """The provider's tracer; `None` if no provider is set."""
    api = sys.modules.get("opentelemetry.trace")
    if api is None:
        return None
    provider = api.get_tracer_provider()
    if isinstance(provider, api.ProxyTracerProvider | api.NoOpTracerProvider):
        return None
    return provider.get_tracer("ragkv")


def current() -> Any | None:
    """The caller's trace context, for another thread; `None` without a provider."""
    return None if tracer() is None else _module("context").get_current()


@contextmanager
def attached(context: Any | None) -> Iterator[None]:
    """Make `context` that of this thread."""
    if context is None:
        yield
        return
    api = _module("context")
    token = api.attach(context)
    try:
        yield
    finally:
        api.detach(token)


@contextmanager
def span(name: str, **attributes: Any) -> Iterator[Any | None]:
    """A span around a block; it is the parent of spans that begin inside. Gives `None` without a provider."""
    found = tracer()
    if found is None:
        yield None
        return
    with started(found, name, None, attributes=attributes) as one:
        yield one


@contextmanager
def server_span(headers: Mapping[str, str]) -> Iterator[Any | None]:
    """The span of a request to a server, in the trace that its headers name. Gives `None` without a provider."""
    found = tracer()
    if found is None:
        yield None
        return
    carrier = {name: headers[name] for name in TRACE_HEADERS if name in headers}
    parent = _module("propagate").extract(carrier)
    with started(found, "request", parent, kind=_module("trace").SpanKind.SERVER) as one:
        yield one


@contextmanager
def started(found: Any, name: str, parent: Any | None, **how: Any) -> Iterator[Any]:
    """A span of the tracer `found` around a block; `None`: its parent is the current span."""
    quiet = {"record_exception": False, "set_status_on_exception": False}
    with found.start_as_current_span(name, context=parent, **quiet, **how) as one:
        try:
            yield one
        except BaseException as error:
            set_error(one, error)
            raise


def set_error(one: Any, error: BaseException) -> None:
    """Mark a span as failed, by the type of the error. A reader that goes away is no failure."""
    if isinstance(error, GeneratorExit):
        return
    api = _module("trace")
    one.set_attribute("error.type", type(error).__name__)
    one.set_status(api.Status(api.StatusCode.ERROR))


def in_span(one: Any, parent: Any | None) -> Any:
    """The context inside a span that began in the context `parent`."""
    return _module("trace").set_span_in_context(one, parent)


def flush() -> None:
    """Hand all ended spans to their exporters, if the provider can: before a process ends without its exit handlers."""
    if tracer() is not None:
        provider = _module("trace").get_tracer_provider()
        getattr(provider, "force_flush", lambda: None)()


def _module(name: str) -> Any:
    """A module of the API. Called only if there is a provider, so the API is installed."""
    return importlib.import_module(f"opentelemetry.{name}")
