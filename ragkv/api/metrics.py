"""The server's Prometheus metrics, in one registry per app.

The routes record answers when they are finished, because only the routes know the time of the first token. The counters
of the engines are read from the engines at each scrape. Every label has a bounded set of values: there are as many
tenants as keys, and no session, document or path is a label.
"""

import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from prometheus_client import (
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

from ragkv import __version__
from ragkv.api.vllm_backend import VllmServer
from ragkv.engine import EngineStats
from ragkv.types import Reuse, Timing

PARTS = ("queue", "lookup", "load", "fuse", "prefill")
STATES = ("exact", "fused", "recomputed", "computed")
CLOSED = (  # why connections are closed; see `connections.py`
    "body_timeout",
    "client_limit",
    "head_timeout",
    "head_too_large",
    "limit",
    "malformed",
    "replaced",
    "rest_timeout",
)
TTFT_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0)
PART_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
TOKEN_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.6, 1.2, 2.5)
REQUEST_S = (0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
RATIOS = (0.0, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.7, 0.9, 1.0)


class TenantStats(NamedTuple):
    """What the metrics say about one open tenant."""

    name: str
    engine: EngineStats
    sessions: int | None  # stored ones; None: the server that has them does not answer
    collections_open: int


class Metrics:
    """The metrics of one app. Thread-safe."""

    def __init__(
        self, tenants: Callable[[], Sequence[TenantStats]], replica: str = "", vllm: VllmServer | None = None
    ) -> None:
        """`tenants` gives the stats of the open tenants; it is called at every scrape and must be fast.

        `vllm` is the server that computes the answers, if one does.
        """
        self.registry = registry = CollectorRegistry()

        def histogram(name: str, help_: str, buckets: Sequence[float], labels: Sequence[str] = ()) -> Histogram:
            return Histogram(name, help_, labels, registry=registry, buckets=buckets)

        self._ttft = histogram(
            "gen_ai_server_time_to_first_token_seconds", "Time from the request to its first token", TTFT_S
        )
        self._parts = histogram(
            "ragkv_time_to_first_token_part_seconds",
            "Parts of the time to the first token; prefill includes load and fuse",
            PART_S,
            ["part"],
        )
        self._per_token = histogram(
            "gen_ai_server_time_per_output_token_seconds", "Mean time per token after the first", TOKEN_S
        )
        self._requests = histogram(
            "http_server_request_duration_seconds",
            "Time from a request to the end of its response, streams included",
            REQUEST_S,
            ["http_route", "http_request_method", "http_response_status_code"],
        )
        self._ratio = histogram("ragkv_recompute_ratio", "Recompute ratio of prompts with fused tokens", RATIOS)
        self._running = Gauge("ragkv_requests_running", "Running requests", registry=registry)
        self._prompt_tokens = Counter(
            "ragkv_prompt_tokens", "Prompt tokens, by how they were obtained", ["state"], registry=registry
        )
        self._answer_tokens = Counter("ragkv_answer_tokens", "Generated tokens", registry=registry)
        self._embedding_tokens = Counter("ragkv_embedding_tokens", "Embedded tokens", registry=registry)
        self._missed = Counter("ragkv_missed_chunks", "Prompt chunks without a usable entry", registry=registry)
        self._connections = Gauge("ragkv_connections", "Open connections", registry=registry)
        self._closed_connections = Counter(
            "ragkv_connections_closed", "Connections closed because of their client", ["reason"], registry=registry
        )
        self._ready = Gauge("ragkv_ready", "1 while requests are accepted", registry=registry)
        Info("ragkv_build", "Version of ragkv", registry=registry).info({"version": __version__})
        Info("ragkv_replica", "This process, as in the header x-replica", registry=registry).info({"replica": replica})
        for part in PARTS:
            self._parts.labels(part)
        for reason in CLOSED:
            self._closed_connections.labels(reason)
        for state in STATES:
            self._prompt_tokens.labels(state)
        registry.register(_EngineCollector(tenants))
        if vllm is not None:
            registry.register(_VllmCollector(vllm))
        ProcessCollector(registry=registry)
        PlatformCollector(registry=registry)

    def record_answer(self, timing: Timing, reuse: Reuse, answer_tokens: int) -> None:
        """Record a finished answer."""
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

    def record_embedding(self, tokens: int) -> None:
        """Record embedded texts."""
        self._embedding_tokens.inc(tokens)

    def record_request(self, route: str, method: str, status: int, seconds: float) -> None:
        """Record a finished request. `route` is a path template, never a path."""
        self._requests.labels(route, method, str(status)).observe(seconds)

    def change_running(self, change: int) -> None:
        """Add `change` to the number of running requests."""
        self._running.inc(change)

    def set_connections(self, count: int) -> None:
        """Set the number of open connections."""
        self._connections.set(count)

    def record_closed_connection(self, reason: str) -> None:
        """Count a connection that was refused, or closed because its client was too slow."""
        self._closed_connections.labels(reason).inc()

    def render(self, is_ready: bool) -> bytes:
        """The metrics in Prometheus' text format. Blocks while the engines collect their stats."""
        self._ready.set(is_ready)
        return generate_latest(self.registry)


_QUEUE_COUNTERS = {
    "served": "Prefilled requests",
    "refused": "Requests refused by a full queue",
    "expired": "Requests whose deadline passed",
    "cancelled": "Cancelled requests",
}
_TIER_COUNTERS = {
    "hits": "Lookups that found an entry",
    "misses": "Lookups that found no entry",
    "evictions": "Evicted entries",
    "damaged": "Entries dropped because their bytes were wrong",
    "read_bytes": "Bytes read",
    "written_bytes": "Bytes written",
}
_STORE_COUNTERS = {
    "dropped_writes": "Entries that were never written",
    "prefetched": "Entries fetched for waiting requests",
}
_REMOTE_COUNTERS = {  # attribute: (name, help)
    "away_s": ("away_seconds", "Time in which it did not answer"),
    "lost_s": ("lost_seconds", "Time that calls without an answer took"),
    "failures": ("failures", "Calls that failed, timeouts included"),
    "timeouts": ("timeouts", "Calls without an answer in time"),
    "skipped": ("skipped", "Calls that were not made because it did not answer before"),
}
_TIER_GAUGES = {"entries": "Stored entries", "used_bytes": "Stored bytes", "capacity_bytes": "Bytes the tier may store"}

_Counts = dict[tuple[str, ...], float]  # by the counter's name and its label values


class _EngineCollector(Collector):
    """Reads the counters of the open tenants' engines at each scrape.

    A Prometheus counter must never decrease, so the last counts of a closed engine are kept and added.
    """

    def __init__(self, tenants: Callable[[], Sequence[TenantStats]]) -> None:
        self._tenants = tenants
        self._lock = threading.Lock()
        self._last: _Counts = {}  # of the engines that were open at the last scrape
        self._closed: _Counts = defaultdict(float)  # of engines that are closed

    def describe(self) -> Iterable[Metric]:
        """Nothing: no engine is open yet at registration."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """All gauges and counters of the open engines."""
        with self._lock:
            tenants = self._tenants()
            counts = self._counts(tenants)
        yield GaugeMetricFamily("ragkv_tenants_open", "Open tenants", value=len(tenants))
        yield from _gauges(tenants)
        for prefix, helps, labels in (
            ("ragkv_queue_", _QUEUE_COUNTERS, ["tenant"]),
            ("ragkv_tier_", _TIER_COUNTERS, ["tenant", "tier"]),
            ("ragkv_store_", _STORE_COUNTERS, ["tenant"]),
            ("ragkv_remote_", dict(_REMOTE_COUNTERS.values()), ["tenant", "remote"]),
        ):
            for name, help_ in helps.items():
                family = CounterMetricFamily(prefix + name, help_, labels=labels)
                for (counter, *values), value in sorted(counts.items()):
                    if counter == prefix + name:
                        family.add_metric(values, value)
                yield family

    def _counts(self, tenants: Sequence[TenantStats]) -> _Counts:
        now: _Counts = {}
        for tenant, stats, *_ in tenants:
            now |= {(f"ragkv_queue_{name}", tenant): getattr(stats.queue, name) for name in _QUEUE_COUNTERS}
            now |= {(f"ragkv_store_{name}", tenant): getattr(stats.store, name) for name in _STORE_COUNTERS}
            for tier in stats.store.tiers:
                now |= {(f"ragkv_tier_{n}", tenant, tier.kind.value): getattr(tier, n) for n in _TIER_COUNTERS}
            for name, remote in stats.remotes.items():
                for attribute, (counter, _) in _REMOTE_COUNTERS.items():
                    now[(f"ragkv_remote_{counter}", tenant, name)] = getattr(remote, attribute)
        for key, last in self._last.items():
            if now.get(key, 0.0) < last:  # the engine was closed, and perhaps opened again
                self._closed[key] += last
        self._last = now
        return {key: now.get(key, 0.0) + self._closed.get(key, 0.0) for key in {*now, *self._closed}}


class _VllmCollector(Collector):
    """Asks the vLLM server for its health at each scrape."""

    def __init__(self, vllm: VllmServer) -> None:
        self._vllm = vllm

    def describe(self) -> Iterable[Metric]:
        """Nothing: the server is not asked at registration."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """Whether it answers, and what became of the requests."""
        self._vllm.failure()  # asks it, so that its stats say how it is now
        stats = self._vllm.stats()
        yield GaugeMetricFamily("ragkv_vllm_answers", "1 while the vLLM server answers", value=stats.problem is None)
        yield GaugeMetricFamily("ragkv_vllm_running", "Answers that vLLM computes now", value=stats.running)
        ended = CounterMetricFamily("ragkv_vllm_requests", "Requests to vLLM, by their end", labels=["end"])
        for end in ("answered", "failed", "cancelled"):
            ended.add_metric([end], getattr(stats, end))
        yield ended


def _gauges(tenants: Sequence[TenantStats]) -> Iterator[Metric]:
    tiers = {
        name: GaugeMetricFamily(f"ragkv_tier_{name}", help_, labels=["tenant", "tier"])
        for name, help_ in _TIER_GAUGES.items()
    }
    waiting = GaugeMetricFamily("ragkv_queue_waiting", "Requests that wait for their prefill", labels=["tenant"])
    admitted = GaugeMetricFamily("ragkv_queue_admitted", "Requests in planning or prefill", labels=["tenant"])
    pending = GaugeMetricFamily("ragkv_store_pending_bytes", "Bytes that wait to be written", labels=["tenant"])
    sessions = GaugeMetricFamily("ragkv_sessions", "Stored conversations", labels=["tenant"])
    collections = GaugeMetricFamily("ragkv_collections_open", "Open collections", labels=["tenant"])
    shared = ["tenant", "remote"]
    answers = GaugeMetricFamily("ragkv_remote_answers", "1 if shared storage answered its last call", labels=shared)
    unconfirmed = GaugeMetricFamily(
        "ragkv_remote_pending_deletions", "Deletions that shared storage has not confirmed yet", labels=shared
    )
    for tenant, stats, session_count, collections_open in tenants:
        collections.add_metric([tenant], collections_open)
        for tier in stats.store.tiers:
            for name, family in tiers.items():
                family.add_metric([tenant, tier.kind.value], getattr(tier, name))
        waiting.add_metric([tenant], stats.queue.waiting)
        admitted.add_metric([tenant], stats.queue.admitted)
        pending.add_metric([tenant], stats.store.pending_bytes)
        if session_count is not None:
            sessions.add_metric([tenant], session_count)
        for name, remote in stats.remotes.items():
            answers.add_metric([tenant, name], remote.answers)
            unconfirmed.add_metric([tenant, name], remote.pending_deletions)
    yield from (
        *tiers.values(),
        waiting,
        admitted,
        pending,
        sessions,
        collections,
        answers,
        unconfirmed,
    )
