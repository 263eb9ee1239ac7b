"""The spans of one request, recorded from its report when it has ended (docs/traces.md).

The report has all times already. So tracing changes nothing on the way of a request, and a request without a tracer
provider pays for one look. Loading and fusing alternate from layer to layer: their spans begin with the pass, and each
is as long as its parts together.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ragkv.runtime import tracing
from ragkv.types import Answer

from .request import ActiveRequest, Request, ServedPrompt


class RequestTrace:
    """The spans of one request. `active` is set when the request has a prompt."""

    def __init__(self, request: Request) -> None:
        """Call it where the request begins: the caller's span is the parent."""
        self._request, self._tracer = request, tracing.tracer()
        self._parent = None if self._tracer is None else tracing.current()
        self._zero_ns = 0  # when the request began, since the epoch
        self._inside: Any = None  # the context of its span
        self.active: ActiveRequest | None = None

    def record(self, error: BaseException | None) -> None:
        """Record the spans of a request that has ended, or failed with `error`."""
        if self._tracer is None:
            return
        elapsed_s = time.perf_counter() - self._request.began
        self._zero_ns = time.time_ns() - round(elapsed_s * 1e9)
        root = self._tracer.start_span("ragkv.request", context=self._parent, start_time=self._zero_ns)
        if root.is_recording():
            self._inside = tracing.in_span(root, self._parent)
            prefill = getattr(self.active, "prefill", None)
            if self.active is not None and prefill is not None:
                root.set_attributes(report_attributes(prefill, self.active.answers))
                self._record_parts(self.active, prefill, elapsed_s)
            if error is not None:
                tracing.set_error(root, error)
        root.end(self._at(elapsed_s))

    def _record_parts(self, active: ActiveRequest, prefill: ServedPrompt, elapsed_s: float) -> None:
        timing, pass_s = prefill.timing, active.queue_s + active.lookup_s
        self._span("ragkv.lookup", active.lookup_at_s, active.lookup_at_s + timing.lookup_s)
        read = {f"ragkv.bytes.{tier}": count for tier, count in prefill.reuse.bytes_by_tier.items()}
        self._span("ragkv.prefill", pass_s, timing.first_token_s)
        self._span("ragkv.load", pass_s, pass_s + timing.load_s, read)
        self._span("ragkv.fuse", pass_s, pass_s + timing.fuse_s)
        if active.request.max_new_tokens:
            ends = [one.timing.first_token_s + one.timing.decode_s for one in active.answers]
            self._span("ragkv.decode", timing.first_token_s, max(ends, default=elapsed_s))

    def _span(self, name: str, begins_s: float, ends_s: float, attributes: dict[str, Any] | None = None) -> None:
        assert self._tracer is not None
        began = self._at(begins_s)
        one = self._tracer.start_span(name, context=self._inside, start_time=began, attributes=attributes)
        one.end(max(began, self._at(ends_s)))

    def _at(self, seconds: float) -> int:
        """Nanoseconds since the epoch, of a time since the request began."""
        return self._zero_ns + round(seconds * 1e9)


def report_attributes(prefill: ServedPrompt, answers: list[Answer]) -> dict[str, Any]:
    """The report of a request as attributes of its span: numbers and names, and nothing that a prompt says."""
    reuse = prefill.reuse
    return {
        "ragkv.prompt_tokens": reuse.tokens,
        "ragkv.exact_tokens": reuse.exact,
        "ragkv.fused_tokens": reuse.fused,
        "ragkv.recomputed_tokens": reuse.recomputed,
        "ragkv.computed_tokens": reuse.computed,
        "ragkv.missed_chunks": reuse.missed_chunks,
        "ragkv.missed_tokens": reuse.missed_tokens,
        "ragkv.ratio": reuse.ratio,
        "ragkv.selector": reuse.selector,
        "ragkv.compute": reuse.compute,
        "ragkv.queue_s": prefill.timing.queue_s,
        "ragkv.answers": len(answers),
        "ragkv.answer_tokens": sum(len(one.token_ids) for one in answers),
        "ragkv.finish_reasons": [one.finish_reason for one in answers],
    }


@contextmanager
def traced(request: Request) -> Iterator[RequestTrace]:
    """Record the spans of a request when the block ends."""
    trace = RequestTrace(request)
    try:
        yield trace
    except BaseException as error:
        trace.record(error)
        raise
    trace.record(None)
