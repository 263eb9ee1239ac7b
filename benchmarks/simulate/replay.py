"""Replays of a trace through policies, and their reports: integers in blocks, to be compared
exactly, and times.

A trace drives a tier of prefix blocks, which asks the policy objects of the live store. TTFT is
`TOKEN_MS` for each token of a block that is not cached (T-LRU paper, figure 3, without its fixed
cost), or what a profile says of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ragkv.config import at_least
from ragkv.store.policies import Policy

from .conversation_model import TraceSettings
from .policies import make_any_policy
from .prefix_tier import OnEvict, PrefixTier
from .readers import read_published
from .trace import Trace, read_rows
from .workloads import BirthDeath, ShareGPTLike

if TYPE_CHECKING:
    from ragkv.control.profile import Profile  # imports torch

GENERATED: dict[str, type[BirthDeath] | type[ShareGPTLike]] = {
    "birth-death": BirthDeath,
    "sharegpt-like": ShareGPTLike,
}
TOKEN_MS = 0.1  # alpha of the T-LRU paper: computing one token
PERCENTILES = {"median": 50, "p90": 90, "p95": 95, "p99": 99}


@dataclass(frozen=True)
class ReplaySetting:
    """How a trace is replayed."""

    capacity_blocks: int
    xi_blocks: int = 0
    xi_ms: float | None = None  # None: the time of xi_blocks computed blocks
    slo_ms: float = 200.0
    forced: bool = False  # forced caching: the conversation just served is not evicted
    profile: "Profile | None" = None  # whose prefill gives the times; None: TOKEN_MS for each token

    def ttft_ms(self, tokens: Any) -> Any:
        """TTFT of so many uncached tokens, a number or an array."""
        return tokens * TOKEN_MS if self.profile is None else 1e3 * self.profile.prefill.at(tokens)

    def __post_init__(self) -> None:
        at_least(self, capacity_blocks=0, xi_blocks=0)


@dataclass(frozen=True)
class Replay:
    """The result of one policy on a trace at one capacity."""

    capacity_blocks: int
    uncached: list[int]  # b of every request, in order


@dataclass(frozen=True)
class Report:
    """One policy at one capacity. Percentiles interpolate linearly over all requests, first turns
    included.
    """

    policy: str
    uncached_blocks: int  # sum of b
    tel_blocks: int  # sum of (b - xi)+
    max_uncached_blocks: int
    capacity_blocks: int
    capacity_over_peak_live: float | None  # None where no conversation returns
    hit_rate: float  # reused blocks / blocks of all prompts
    median_ms: float
    p90_ms: float
    p95_ms: float
    p99_ms: float
    tel_ms: float  # sum of (TTFT - xi)+
    slo_misses: int  # requests with TTFT above the SLO


def load_trace(where: str, block_tokens: int) -> Trace:
    """A trace as CSV or as published, or a generated load by its name. Raises `InputError`."""
    if where in GENERATED:
        return GENERATED[where]().trace(block_tokens)
    return (read_rows if where.endswith(".csv") else read_published)(Path(where), block_tokens)


def xi_blocks(xi_ms: float, block_tokens: int, profile: "Profile | None" = None) -> int:
    """The blocks that may be computed within `xi_ms`, rounded down."""
    if profile is not None:
        return profile.tokens_within(xi_ms / 1e3) // block_tokens
    # .3 / .1 is 2.9999999999999996
    return max(0, int(xi_ms / (TOKEN_MS * block_tokens) * (1 + 1e-12)))


def replay(
    trace: Trace,
    policy: Policy,
    capacity_blocks: int,
    *,
    forced: bool = False,
    on_evict: OnEvict | None = None,
) -> Replay:
    """Run `trace` through `policy` with a tier of `capacity_blocks`; `forced`: the conversation
    just served stays.
    """
    serve = PrefixTier(policy, capacity_blocks, on_evict).serve
    return Replay(capacity_blocks, [serve(turn, forced) for turn in trace.turns])


def policy_for(name: str, trace: Trace, setting: ReplaySetting) -> Policy:
    """A policy with the knowledge of the trace that the papers give it: Q^, Q's distribution, the
    model's rates.
    """
    turns, ends = trace.rates
    settings = TraceSettings(
        xi_blocks=setting.xi_blocks,
        block_tokens=trace.block_tokens,
        new_blocks=trace.expected_new_blocks,
        new_blocks_seen=tuple(trace.new_blocks),
        turn_rate_per_s=turns,
        end_rate_per_s=ends,
    )
    return make_any_policy(name, settings)


def simulate(trace: Trace, names: Sequence[str], setting: ReplaySetting) -> list[Report]:
    """Every policy over the trace, one report each; raises `ConfigError` for an unknown policy."""
    # before anything runs
    policies = {name: policy_for(name, trace, setting) for name in names}
    return [
        report_of(
            name,
            trace,
            replay(trace, policy, setting.capacity_blocks, forced=setting.forced),
            setting,
        )
        for name, policy in policies.items()
    ]


def report_of(policy: str, trace: Trace, done: Replay, setting: ReplaySetting) -> Report:
    """What came of a replay by the policy of that name."""
    uncached = np.array(done.uncached)
    xi_ms = (
        setting.ttft_ms(setting.xi_blocks * trace.block_tokens)
        if setting.xi_ms is None
        else setting.xi_ms
    )
    ttft = setting.ttft_ms(uncached * trace.block_tokens)
    prompts = max(1, sum(turn.prompt for turn in trace.turns))
    times = np.percentile(ttft, list(PERCENTILES.values()))
    return Report(
        policy=policy,
        uncached_blocks=int(uncached.sum()),
        tel_blocks=int(np.maximum(uncached - setting.xi_blocks, 0).sum()),
        max_uncached_blocks=int(uncached.max()),
        capacity_blocks=done.capacity_blocks,
        capacity_over_peak_live=done.capacity_blocks / trace.peak_live if trace.peak_live else None,
        hit_rate=1 - float(uncached.sum()) / prompts,
        tel_ms=float(np.maximum(ttft - xi_ms, 0).sum()),
        slo_misses=int((ttft > setting.slo_ms + 1e-9).sum()),
        **{f"{name}_ms": float(time) for name, time in zip(PERCENTILES, times, strict=True)},
    )
