"""What the server measures, for Prometheus: a registry per app.

Answers are observed by their routes when they are over, since only those know the first token's time. What engines
count themselves is read from them when it is asked for. No label grows without bound: tenants are as many as keys, and
no session, document or path is one.
"""

import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    Info,
    PlatformCollector,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from starlette.requests import HTTPConnection

from ragkv import __version__
from ragkv.engine import EngineStats
from ragkv.types import Reuse, Timing

from .keys import Principal
from .limits import Limiter
from .logs import Observed

CONTENT_TYPE = CONTENT_TYPE_LATEST
PARTS = ("queue", "lookup", "load", "fuse", "prefill")
STATES = ("exact", "fused", "recomputed", "computed")
TTFT_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0)
PART_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
TOKEN_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.6, 1.2, 2.5)
REQUEST_S = (0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
RATIOS = (0.0, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.7, 0.9, 1.0)

Tenant = tuple[str, EngineStats, int]  # its name, what its engine says, sessions kept


class Metrics:
    """The metrics of one app. Thread-safe."""

    def __init__(self, tenants: Callable[[], Sequence[Tenant]]) -> None:
        """`tenants` says what the open ones hold; it is asked at every scrape and must be quick."""
        self.registry = registry = CollectorRegistry()
        self._ttft = Histogram(
            "gen_ai_server_time_to_first_token_seconds",
            "From the request to its first token",
            registry=registry,
            buckets=TTFT_S,
        )
        self._parts = Histogram(
            "ragkv_time_to_first_token_part_seconds",
            "Where the time to the first token went; prefill has load and fuse in it",
            ["part"],
            registry=registry,
            buckets=PART_S,
        )
        self._per_token = Histogram(
            "gen_ai_server_time_per_output_token_seconds",
            "Mean time of a token after the first",
            registry=registry,
            buckets=TOKEN_S,
        )
        self._requests = Histogram(
            "http_server_request_duration_seconds",
            "From a request to the end of its response, streams whole",
            ["http_route", "http_request_method", "http_response_status_code"],
            registry=registry,
            buckets=REQUEST_S,
        )
        self._running = Gauge("ragkv_requests_running", "Requests being answered", registry=registry)
        self._ratio = Histogram(
            "ragkv_recompute_ratio",
            "Recompute ratio in force where something was fused",
            registry=registry,
            buckets=RATIOS,
        )
        self._prompt_tokens = Counter(
            "ragkv_prompt_tokens", "Tokens of prompts by what became of them", ["state"], registry=registry
        )
        self._answer_tokens = Counter("ragkv_answer_tokens", "Tokens generated", registry=registry)
        self._embedding_tokens = Counter("ragkv_embedding_tokens", "Tokens embedded", registry=registry)
        self._missed = Counter("ragkv_missed_chunks", "Chunks of prompts that had no usable entry", registry=registry)
        self._ready = Gauge("ragkv_ready", "1 while requests are taken", registry=registry)
        Info("ragkv_build", "What runs", registry=registry).info({"version": __version__})
        for part in PARTS:
            self._parts.labels(part)
        for state in STATES:
            self._prompt_tokens.labels(state)
        registry.register(_Engines(tenants))
        ProcessCollector(registry=registry)
        PlatformCollector(registry=registry)

    def answer(self, timing: Timing, reuse: Reuse, answer_tokens: int) -> None:
        """An answer that is over."""
        self._ttft.observe(timing.first_token_s)
        for part in PARTS:
            self._parts.labels(part).observe(getattr(timing, f"{part}_s"))
        if answer_tokens > 1:
            self._per_token.observe(timing.decode_s / (answer_tokens - 1))
        for state in STATES:
            self._prompt_tokens.labels(state).inc(getattr(reuse, state))
        if reuse.fused or reuse.recomputed:
            self._ratio.observe(reuse.ratio)
        self._answer_tokens.inc(answer_tokens)
        self._missed.inc(reuse.missed_chunks)

    def embedding(self, tokens: int) -> None:
        """Texts that were embedded."""
        self._embedding_tokens.inc(tokens)

    def request(self, route: str, method: str, status: int, seconds: float) -> None:
        """A request that is over. `route` is a template, never a path."""
        self._requests.labels(route, method, str(status)).observe(seconds)

    def running(self, change: int) -> None:
        """One more request, or one fewer."""
        self._running.inc(change)

    def ready(self, is_ready: bool) -> None:
        """Whether requests are taken."""
        self._ready.set(is_ready)

    def render(self) -> bytes:
        """The exposition, as Prometheus reads it. Blocks for as long as the engines take to say what they hold."""
        return generate_latest(self.registry)


# One counter of engines: its name, what it says, and how it is read.
_QUEUE = {
    "served": "Requests prefilled",
    "refused": "Requests refused by a full queue",
    "expired": "Requests whose deadline passed",
    "cancelled": "Requests called off",
}
_TIER = {
    "hits": "Entries found",
    "misses": "Entries looked for and not found",
    "evictions": "Entries evicted",
    "damaged": "Entries dropped because their bytes were wrong",
    "read_bytes": "Bytes read",
    "written_bytes": "Bytes written",
}


class _Engines(Collector):
    """What the open tenants' engines count, read at each scrape.

    A counter never falls: an engine that was closed leaves what it was last seen to have counted.
    """

    def __init__(self, tenants: Callable[[], Sequence[Tenant]]) -> None:
        self._tenants = tenants
        self._lock = threading.Lock()
        self._last: dict[tuple[str, ...], float] = {}  # of engines, by name of the counter and its labels
        self._gone: dict[tuple[str, ...], float] = defaultdict(float)

    def describe(self) -> Iterable[Metric]:
        """Nothing: names are not asked for at registration, where no engine may be open yet."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """The families."""
        with self._lock:
            tenants = self._tenants()
            counted = self._counted(tenants)
        yield GaugeMetricFamily("ragkv_tenants_open", "Tenants open", value=len(tenants))
        yield from _gauges(tenants)
        for name, help_ in _QUEUE.items():
            yield _counter(f"ragkv_queue_{name}", help_, ["tenant"], counted)
        for name, help_ in _TIER.items():
            yield _counter(f"ragkv_tier_{name}", help_, ["tenant", "tier"], counted)
        yield _counter("ragkv_store_dropped_writes", "Entries that were never written", ["tenant"], counted)
        yield _counter("ragkv_store_prefetched", "Entries fetched for requests that waited", ["tenant"], counted)

    def _counted(self, tenants: Sequence[Tenant]) -> dict[tuple[str, ...], float]:
        now: dict[tuple[str, ...], float] = {}
        for tenant, stats, _ in tenants:
            for name in _QUEUE:
                now[f"ragkv_queue_{name}", tenant] = getattr(stats.queue, name)
            for tier in stats.store.tiers:
                for name in _TIER:
                    now[f"ragkv_tier_{name}", tenant, tier.kind.value] = getattr(tier, name)
            now["ragkv_store_dropped_writes", tenant] = stats.store.dropped_writes
            now["ragkv_store_prefetched", tenant] = stats.store.prefetched
        for key, last in self._last.items():
            if now.get(key, 0.0) < last:  # closed since, or closed and opened again
                self._gone[key] += last
        self._last = now
        return {key: now.get(key, 0.0) + self._gone.get(key, 0.0) for key in {*now, *self._gone}}


def _gauges(tenants: Sequence[Tenant]) -> Iterator[Metric]:
    tiers = {
        "entries": GaugeMetricFamily("ragkv_tier_entries", "Entries held", labels=["tenant", "tier"]),
        "used_bytes": GaugeMetricFamily("ragkv_tier_used_bytes", "Bytes held", labels=["tenant", "tier"]),
        "capacity_bytes": GaugeMetricFamily(
            "ragkv_tier_capacity_bytes", "Bytes it may hold", labels=["tenant", "tier"]
        ),
    }
    waiting = GaugeMetricFamily("ragkv_queue_waiting", "Requests waiting to be prefilled", labels=["tenant"])
    admitted = GaugeMetricFamily("ragkv_queue_admitted", "Requests planning or prefilling", labels=["tenant"])
    pending = GaugeMetricFamily("ragkv_store_pending_bytes", "Bytes waiting to be written", labels=["tenant"])
    sessions = GaugeMetricFamily("ragkv_sessions", "Conversations kept", labels=["tenant"])
    for tenant, stats, kept in tenants:
        for tier in stats.store.tiers:
            for name, family in tiers.items():
                family.add_metric([tenant, tier.kind.value], getattr(tier, name))
        waiting.add_metric([tenant], stats.queue.waiting)
        admitted.add_metric([tenant], stats.queue.admitted)
        pending.add_metric([tenant], stats.store.pending_bytes)
        sessions.add_metric([tenant], kept)
    yield from tiers.values()
    yield from (waiting, admitted, pending, sessions)


def _counter(name: str, help_: str, labels: Sequence[str], counted: dict[tuple[str, ...], float]) -> Metric:
    family = CounterMetricFamily(name, help_, labels=labels)
    for (counter, *values), value in sorted(counted.items()):
        if counter == name:
            family.add_metric(values, value)
    return family


def answered(request: HTTPConnection, timing: Timing, reuse: Reuse, answer_tokens: int) -> None:
    """An answer is over: into the access line, the histograms, and the key's tokens a minute. Call it once for each."""
    observed: Observed = request.state.observed
    observed.prompt_tokens = (observed.prompt_tokens or 0) + reuse.tokens
    observed.reused_tokens = (observed.reused_tokens or 0) + reuse.exact + reuse.fused
    observed.answer_tokens = (observed.answer_tokens or 0) + answer_tokens
    if observed.ttft_s is None:
        observed.ttft_s = timing.first_token_s
    conduct: Any = request.app.state.server
    conduct.metrics.answer(timing, reuse, answer_tokens)
    _charge(request, conduct.limiter, reuse.tokens + answer_tokens)


def embedded(request: HTTPConnection, tokens: int) -> None:
    """Texts were embedded: into the access line, the counter, and the key's tokens a minute."""
    observed: Observed = request.state.observed
    observed.prompt_tokens = (observed.prompt_tokens or 0) + tokens
    conduct: Any = request.app.state.server
    conduct.metrics.embedding(tokens)
    _charge(request, conduct.limiter, tokens)


def _charge(request: HTTPConnection, limiter: Limiter, tokens: int) -> None:
    principal: Principal = request.state.principal
    limiter.charge_tokens(principal, tokens)


__all__ = ["CONTENT_TYPE", "Metrics", "Tenant", "answered", "embedded"]
