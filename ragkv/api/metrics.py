"""The server's Prometheus metrics, in one registry per app.

The routes record answers when they are finished, because only the routes know the time of the first
token. The counters of the engines are read from the engines at each scrape. Every label has a
bounded set of values: there are as many tenants as keys, and no session, document or path is a
label.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from ragkv import __version__
from ragkv.engine_stats import EngineStats
from ragkv.types import Reuse, Timing
from ragkv.vllm.front import VllmServer

PARTS = ("queue", "lookup", "load", "fuse", "prefill")
STATES = ("exact", "fused", "recomputed", "computed")
# `SECONDS` and `RATIOS` are the upper bounds of the histograms' buckets.
SECONDS = (
    *(one * 10.0**power for power in (-3, -2, -1, 0, 1) for one in (1.0, 2.5, 5.0)),
    100.0,
    300.0,
)
RATIOS = (0.0, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 0.7, 1.0)


class TenantStats(NamedTuple):
    """What the metrics say about one open tenant."""

    name: str
    engine: EngineStats
    sessions: int | None  # stored ones; None: the server that has them does not answer


class Metrics:
    """The metrics of one app."""

    def __init__(
        self,
        tenants: Callable[[], Sequence[TenantStats]],
        replica: str = "",
        vllm: VllmServer | None = None,
    ) -> None:
        """`tenants` gives the stats of the open tenants; it is called at every scrape and must be
        fast.

        `vllm` is the server that computes the answers, if one does.
        """
        self.registry = registry = CollectorRegistry()
        seconds = partial(Histogram, registry=registry, buckets=SECONDS)
        count = partial(Counter, registry=registry)
        gauge = partial(Gauge, registry=registry)
        self._ttft = seconds(
            "gen_ai_server_time_to_first_token_seconds", "Time from the request to its first token"
        )
        parts = "Parts of the time to the first token; prefill includes load and fuse"
        self._parts = seconds("ragkv_time_to_first_token_part_seconds", parts, ["part"])
        self._per_token = seconds(
            "gen_ai_server_time_per_output_token_seconds", "Mean time per token after the first"
        )
        self.requests = seconds(
            "http_server_request_duration_seconds",
            "Time from a request to the end of its response, streams included",
            ["http_route", "http_request_method", "http_response_status_code"],
        )
        ratio = "Recompute ratio of prompts with fused tokens"
        self._ratio = Histogram("ragkv_recompute_ratio", ratio, registry=registry, buckets=RATIOS)
        self.running = gauge("ragkv_requests_running", "Running requests")
        self._prompt_tokens = count(
            "ragkv_prompt_tokens", "Prompt tokens, by how they were obtained", ["state"]
        )
        self._answer_tokens = count("ragkv_answer_tokens", "Generated tokens")
        self._drafted = count("ragkv_drafted_tokens", "Answer tokens drafted from the prompt")
        self._accepted = count("ragkv_accepted_tokens", "Drafted tokens that were right")
        self.embedding_tokens = count("ragkv_embedding_tokens", "Embedded tokens")
        self._missed = count("ragkv_missed_chunks", "Prompt chunks without a usable entry")
        self.ready = gauge("ragkv_ready", "1 while requests are accepted")
        Info("ragkv_build", "Version of ragkv", registry=registry).info({"version": __version__})
        Info("ragkv_replica", "This process, as in the header x-replica", registry=registry).info(
            {"replica": replica}
        )
        for part in PARTS:
            self._parts.labels(part)
        for state in STATES:
            self._prompt_tokens.labels(state)
        registry.register(_EngineCollector(tenants))
        if vllm is not None:
            answers = gauge("ragkv_vllm_answers", "1 while the vLLM server answers")
            answers.set_function(lambda: vllm.failure() is None)  # It is asked at each scrape.
        ProcessCollector(registry=registry)

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


# What is read at each scrape: names without "ragkv_", helps, and attributes. Names that begin with
# "tier" or "remote" are of each tier or shared storage, the others of each tenant.
_COUNTERS = (
    ("queue_served", "Prefilled requests", "engine.queue.served"),
    ("queue_refused", "Requests refused by a full queue", "engine.queue.refused"),
    ("queue_expired", "Requests whose deadline passed", "engine.queue.expired"),
    ("queue_cancelled", "Cancelled requests", "engine.queue.cancelled"),
    ("store_dropped_writes", "Entries that were never written", "engine.store.dropped_writes"),
    ("store_prefetched", "Entries fetched for waiting requests", "engine.store.prefetched"),
    ("tier_hits", "Lookups that found an entry", "hits"),
    ("tier_misses", "Lookups that found no entry", "misses"),
    ("tier_evictions", "Evicted entries", "evictions"),
    ("tier_damaged", "Entries dropped because their bytes were wrong", "damaged"),
    ("tier_read_bytes", "Bytes read", "read_bytes"),
    ("tier_written_bytes", "Bytes written", "written_bytes"),
    ("remote_away_seconds", "Time in which it did not answer", "away_s"),
    ("remote_failures", "Calls that failed, timeouts included", "failures"),
    ("remote_skipped", "Calls that were not made because it did not answer before", "skipped"),
)
_GAUGES = (
    ("queue_waiting", "Requests that wait for their prefill", "engine.queue.waiting"),
    ("queue_admitted", "Requests in planning or prefill", "engine.queue.admitted"),
    ("store_pending_bytes", "Bytes that wait to be written", "engine.store.pending_bytes"),
    ("sessions", "Stored conversations", "sessions"),
    ("tier_entries", "Stored entries", "entries"),
    ("tier_used_bytes", "Stored bytes", "used_bytes"),
    ("tier_capacity_bytes", "Bytes the tier may store", "capacity_bytes"),
    ("remote_answers", "1 if shared storage answered its last call", "answers"),
    ("remote_pending_deletions", "Deletions that it has not confirmed yet", "pending_deletions"),
)


class _EngineCollector(Collector):
    """Reads the numbers of the open tenants' engines at each scrape.

    The counters of a tenant that was closed begin at 0 when it is opened again, as after a restart
    of the server, which `rate()` of Prometheus allows for.
    """

    def __init__(self, tenants: Callable[[], Sequence[TenantStats]]) -> None:
        self._tenants = tenants

    def collect(self) -> Iterator[Metric]:
        """All gauges and counters of the open engines; values that are unknown are left out."""
        tenants = self._tenants()
        yield GaugeMetricFamily("ragkv_tenants_open", "Open tenants", value=len(tenants))
        sources: dict[str, list[tuple[list[str], Any]]] = {"tier": [], "remote": []}
        for one in tenants:
            remotes = one.engine.remotes.items()
            sources["tier"] += [([one.name, t.kind], t) for t in one.engine.store.tiers]
            sources["remote"] += [([one.name, name], remote) for name, remote in remotes]
        of_tenants: list[tuple[list[str], Any]] = [([one.name], one) for one in tenants]
        for make, table in ((CounterMetricFamily, _COUNTERS), (GaugeMetricFamily, _GAUGES)):
            for name, help_, attribute in table:
                kind = name.partition("_")[0]
                labels = ["tenant", kind] if kind in sources else ["tenant"]
                family = make(f"ragkv_{name}", help_, labels=labels)
                for values, source in sources.get(kind, of_tenants):
                    if (value := attrgetter(attribute)(source)) is not None:
                        family.add_metric(values, value)
                yield family
