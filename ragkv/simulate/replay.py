"""The replay: a bounded tier of prefix blocks, driven by a trace, asking the same policy objects as the live store.

Serving a request charges `b = in - min(X, sh)` blocks, sets X := L and evicts while more than C blocks are held, in
that order; the served conversation's own blocks are candidates too (optional caching), unless caching is forced.
"""

from collections.abc import Callable
from dataclasses import dataclass

from ragkv.store.policies import Cut, Policy, Turn

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
    tier = PrefixTier(policy, capacity_blocks, on_evict)
    serve = tier.serve
    return Replay(policy.name, capacity_blocks, [serve(turn, forced) for turn in trace.turns])


class PrefixTier:
    """A bounded tier: blocks held of each conversation, always its first."""

    def __init__(self, policy: Policy, capacity: int, on_evict: OnEvict | None = None) -> None:
        self.held: dict[str, int] = {}
        self.used = 0
        self._policy = policy
        self._capacity = capacity
        self._on_evict = on_evict

    def serve(self, turn: Turn, forced: bool = False) -> int:
        """Serve one turn; its uncached blocks b."""
        group, length, shared, policy = turn.group, turn.length, turn.shared, self._policy
        had = self.held.get(group, 0)
        policy.served(turn)
        if length != had:
            policy.held(group, length, length, turn.at)
            self.held[group] = length
            self.used += length - had
        for cut in policy.trims(self.used > self._capacity, turn.at):
            self.take(cut, turn.at)
        if self.used > self._capacity:
            self.make_room((group,) if forced else (), turn.at)
        return turn.prompt - (had if had < shared else shared)

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
