"""The server's Prometheus metrics, in one registry per app.

The routes record answers when they are finished, because only the routes know the time of the first token. The counters
of the engines are read from the engines at each scrape. Every label has a bounded set of values: there are as many
tenants as keys, and no session, document or path is a label.
"""

from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter
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
        self._drafted = Counter("ragkv_drafted_tokens", "Answer tokens drafted from the prompt", registry=registry)
        self._accepted = Counter("ragkv_accepted_tokens", "Drafted tokens that were right", registry=registry)
        self._embedding_tokens = Counter("ragkv_embedding_tokens", "Embedded tokens", registry=registry)
        self._missed = Counter("ragkv_missed_chunks", "Prompt chunks without a usable entry", registry=registry)
        self._ready = Gauge("ragkv_ready", "1 while requests are accepted", registry=registry)
        Info("ragkv_build", "Version of ragkv", registry=registry).info({"version": __version__})
        Info("ragkv_replica", "This process, as in the header x-replica", registry=registry).info({"replica": replica})
        for part in PARTS:
            self._parts.labels(part)
        for state in STATES:
            self._prompt_tokens.labels(state)
        registry.register(_EngineCollector(tenants))
        if vllm is not None:
            answers = Gauge("ragkv_vllm_answers", "1 while the vLLM server answers", registry=registry)
            answers.set_function(lambda: vllm.failure() is None)  # It is asked at each scrape.
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
        self._drafted.inc(timing.drafted)
        self._accepted.inc(timing.accepted)
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

    def render(self, is_ready: bool) -> bytes:
        """The metrics in Prometheus' text format. Blocks while the engines collect their stats."""
        self._ready.set(is_ready)
        return generate_latest(self.registry)


class _Read(NamedTuple):
    """A metric that is read from the open tenants at each scrape."""

    name: str  # without "ragkv_"
    help_: str
    value: str  # the attribute of a tenant, a tier or a remote storage
    family: type[CounterMetricFamily] | type[GaugeMetricFamily] = CounterMetricFamily


_GAUGE = GaugeMetricFamily


_OF_TENANTS = (
    _Read("queue_served", "Prefilled requests", "engine.queue.served"),
    _Read("queue_refused", "Requests refused by a full queue", "engine.queue.refused"),
    _Read("queue_expired", "Requests whose deadline passed", "engine.queue.expired"),
    _Read("queue_cancelled", "Cancelled requests", "engine.queue.cancelled"),
    _Read("store_dropped_writes", "Entries that were never written", "engine.store.dropped_writes"),
    _Read("store_prefetched", "Entries fetched for waiting requests", "engine.store.prefetched"),
    _Read("queue_waiting", "Requests that wait for their prefill", "engine.queue.waiting", _GAUGE),
    _Read("queue_admitted", "Requests in planning or prefill", "engine.queue.admitted", _GAUGE),
    _Read("store_pending_bytes", "Bytes that wait to be written", "engine.store.pending_bytes", _GAUGE),
    _Read("sessions", "Stored conversations", "sessions", _GAUGE),
)
_OF_TIERS = (
    _Read("tier_hits", "Lookups that found an entry", "hits"),
    _Read("tier_misses", "Lookups that found no entry", "misses"),
    _Read("tier_evictions", "Evicted entries", "evictions"),
    _Read("tier_damaged", "Entries dropped because their bytes were wrong", "damaged"),
    _Read("tier_read_bytes", "Bytes read", "read_bytes"),
    _Read("tier_written_bytes", "Bytes written", "written_bytes"),
    _Read("tier_entries", "Stored entries", "entries", _GAUGE),
    _Read("tier_used_bytes", "Stored bytes", "used_bytes", _GAUGE),
    _Read("tier_capacity_bytes", "Bytes the tier may store", "capacity_bytes", _GAUGE),
)
_OF_REMOTES = (
    _Read("remote_away_seconds", "Time in which it did not answer", "away_s"),
    _Read("remote_failures", "Calls that failed, timeouts included", "failures"),
    _Read("remote_skipped", "Calls that were not made because it did not answer before", "skipped"),
    _Read("remote_answers", "1 if shared storage answered its last call", "answers", _GAUGE),
    _Read(
        "remote_pending_deletions", "Deletions that shared storage has not confirmed yet", "pending_deletions", _GAUGE
    ),
)
_LABELS = {_OF_TENANTS: ["tenant"], _OF_TIERS: ["tenant", "tier"], _OF_REMOTES: ["tenant", "remote"]}


class _EngineCollector(Collector):
    """Reads the numbers of the open tenants' engines at each scrape.

    The counters of a tenant that was closed begin at 0 when it is opened again, as after a restart of the server, which
    `rate()` of Prometheus allows for.
    """

    def __init__(self, tenants: Callable[[], Sequence[TenantStats]]) -> None:
        self._tenants = tenants

    def collect(self) -> Iterator[Metric]:
        """All gauges and counters of the open engines; values that are unknown are left out."""
        tenants = self._tenants()
        yield GaugeMetricFamily("ragkv_tenants_open", "Open tenants", value=len(tenants))
        for metrics, labels in _LABELS.items():
            for metric in metrics:
                family = metric.family(f"ragkv_{metric.name}", metric.help_, labels=labels)
                for label_values, source in _sources(tenants, labels):
                    if (value := attrgetter(metric.value)(source)) is not None:
                        family.add_metric(label_values, value)
                yield family


def _sources(tenants: Sequence[TenantStats], labels: Sequence[str]) -> Iterator[tuple[list[str], object]]:
    """The tenants, their tiers or their remotes, as the `labels` say, each with the values of the labels."""
    for tenant in tenants:
        if "tier" in labels:
            yield from (([tenant.name, tier.kind.value], tier) for tier in tenant.engine.store.tiers)
        elif "remote" in labels:
            yield from (([tenant.name, name], remote) for name, remote in tenant.engine.remotes.items())
        else:
            yield [tenant.name], tenant
