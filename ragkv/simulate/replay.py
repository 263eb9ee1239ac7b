"""The replay: a bounded tier of prefix blocks, driven by a trace, asking the same policy objects as the live store.

Serving a request charges `b = in - min(X, sh)` blocks, sets X := L and evicts while more than C blocks are held, in
that order; the served conversation's own blocks are candidates too (optional caching), unless caching is forced.
"""

from collections.abc import Callable
from dataclasses import dataclass

from ragkv.store.policies import Cut, Policy

from .trace import Trace

OnEvict = Callable[[str, int], None]  # group, blocks taken off its tail


@dataclass(frozen=True)
class Replay:
    """What one policy made of a trace at one capacity."""

    policy: str
    capacity_blocks: int
    uncached: list[int]  # b of every request, in order


def replay(
    trace: Trace, policy: Policy, capacity_blocks: int, *, forced: bool = False, on_evict: OnEvict | None = None
) -> Replay:
    """Run `trace` through `policy` with `capacity_blocks` blocks of room. `forced`: what was just served stays."""
    tier = _Tier(policy, capacity_blocks, on_evict)
    held = tier.held
    uncached: list[int] = []
    charge, served, told, trims = uncached.append, policy.served, policy.held, policy.trims
    for turn in trace.turns:
        group, length, shared = turn.group, turn.length, turn.shared
        had = held.get(group, 0)
        charge(turn.prompt - (had if had < shared else shared))
        served(turn)
        if length != had:
            told(group, length, length, turn.at)
            held[group] = length
            tier.used += length - had
        overflows = tier.used > capacity_blocks
        for cut in trims(overflows, turn.at):
            tier.take(cut, turn.at)
        if tier.used > capacity_blocks:
            tier.make_room((group,) if forced else (), turn.at)
    return Replay(policy.name, capacity_blocks, uncached)


class _Tier:
    """Blocks held of each conversation."""

    def __init__(self, policy: Policy, capacity: int, on_evict: OnEvict | None) -> None:
        self.held: dict[str, int] = {}
        self.used = 0
        self._policy = policy
        self._capacity = capacity
        self._on_evict = on_evict

    def make_room(self, pinned: tuple[str, ...], now: float) -> None:
        """Evict while more is held than there is room for; a pinned group gives its own tail when it is alone."""
        while self.used > self._capacity:
            cut = self._policy.victim(pinned, now) or Cut(pinned[0])
            self.take(cut, now)

    def take(self, cut: Cut, now: float) -> None:
        """Take blocks off the tail of a group: down to `keep` if the cut is whole, else as many as needed."""
        group, keep, whole = cut
        had = self.held.get(group, 0)
        left = keep if whole else max(keep, had - (self.used - self._capacity))
        if left >= had:
            assert whole, f"{self._policy.name} must not name a cut that frees nothing"
            return
        self.used -= had - left
        if left:
            self.held[group] = left
        else:
            del self.held[group]
        self._policy.held(group, left, left, now)
        if self._on_evict is not None:
            self._on_evict(group, had - left)
