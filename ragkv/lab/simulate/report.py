"""The replay of a trace, and its report: integers in blocks, to be compared exactly, and the times made of them.

A trace drives a tier of prefix blocks, which asks the policy objects of the live store.
"""

from dataclasses import dataclass

import numpy as np

from ragkv.store.policies import OnEvict, Policy, PrefixTier

from .token_times import TokenTimes
from .trace import Trace

PERCENTILES = {"median": 50, "p90": 90, "p95": 95, "p99": 99}


@dataclass(frozen=True)
class Replay:
    """The result of one policy on a trace at one capacity."""

    policy: str
    capacity_blocks: int
    uncached: list[int]  # b of every request, in order


def replay(
    trace: Trace, policy: Policy, capacity_blocks: int, *, forced: bool = False, on_evict: OnEvict | None = None
) -> Replay:
    """Run `trace` through `policy` with a tier of `capacity_blocks`; `forced`: the conversation just served stays."""
    tier = PrefixTier(policy, capacity_blocks, on_evict)
    serve = tier.serve
    return Replay(policy.name, capacity_blocks, [serve(turn, forced) for turn in trace.turns])


@dataclass(frozen=True)
class Report:
    """One policy at one capacity. Percentiles interpolate linearly over all requests, first turns included."""

    policy: str
    uncached_blocks: int  # sum of b
    tel_blocks: int  # sum of (b - xi)+
    max_uncached_blocks: int
    capacity_blocks: int
    capacity_over_peak_live: float | None  # None where no conversation returns
    hit_rate: float  # reused blocks / blocks of all prompts
    memory_hit_rate: float  # read from memory; equal to hit_rate where there is no disk
    disk_hit_rate: float
    median_ms: float
    p90_ms: float
    p95_ms: float
    p99_ms: float
    tel_ms: float  # sum of (TTFT - xi)+
    slo_misses: int  # requests with TTFT above the SLO


@dataclass(frozen=True)
class Measure:
    """The profile and thresholds that turn replays into reports."""

    profile: TokenTimes
    xi_blocks: int
    xi_ms: float
    slo_ms: float

    def report(self, trace: Trace, memory: Replay, disk: Replay | None = None) -> Report:
        """The report of one tier, or of memory above a disk that holds what memory drops.

        Both tiers see every turn and neither sees the other, as in the live store, where every put reaches both; the
        longer of the two prefixes is reused.
        """
        prompts = np.array([turn.prompt for turn in trace.turns])
        fast = prompts - np.array(memory.uncached)
        reused = fast if disk is None else np.maximum(fast, prompts - np.array(disk.uncached))
        uncached, loaded = prompts - reused, reused - fast
        per_block = trace.block_tokens * np.array([self.profile.token_ms, self.profile.load_token_ms])
        ttft = self.profile.fixed_ms + per_block[0] * uncached + per_block[1] * loaded
        times = np.percentile(ttft, list(PERCENTILES.values()))
        total = max(1, int(prompts.sum()))
        return Report(
            policy=memory.policy,
            uncached_blocks=int(uncached.sum()),
            tel_blocks=int(np.maximum(uncached - self.xi_blocks, 0).sum()),
            max_uncached_blocks=int(uncached.max()),
            capacity_blocks=memory.capacity_blocks,
            capacity_over_peak_live=memory.capacity_blocks / trace.peak_live if trace.peak_live else None,
            hit_rate=float(reused.sum()) / total,
            memory_hit_rate=float(fast.sum()) / total,
            disk_hit_rate=float(loaded.sum()) / total,
            tel_ms=float(np.maximum(ttft - self.xi_ms, 0).sum()),
            slo_misses=int((ttft > self.slo_ms + 1e-9).sum()),
            **{f"{name}_ms": float(time) for name, time in zip(PERCENTILES, times, strict=True)},
        )
