"""The replay: a bounded tier of prefix blocks, driven by a trace, which asks the policy objects of the live store.

Serving a request charges `b = in - min(X, sh)` blocks, sets X := L and evicts while more than C blocks are held, in
that order. The served conversation's own blocks may be evicted too (optional caching), unless caching is forced.
"""

from collections.abc import Callable
from dataclasses import dataclass

from ragkv.store.policies import Cut, Policy, Turn

from .trace import Trace

OnEvict = Callable[[str, int], None]  # called with a group and the number of blocks it loses


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


class PrefixTier:
    """A bounded tier that holds the first blocks of each conversation."""

    def __init__(self, policy: Policy, capacity: int, on_evict: OnEvict | None = None) -> None:
        self.held: dict[str, int] = {}
        self._used = 0
        self._policy = policy
        self._capacity = capacity
        self._on_evict = on_evict

    def serve(self, turn: Turn, forced: bool = False) -> int:
        """Serve one turn; returns its uncached blocks b."""
        group, length, shared, policy = turn.group, turn.length, turn.shared, self._policy
        had = self.held.get(group, 0)
        policy.served(turn)
        if length != had:
            policy.held(group, length, length, turn.at)
            self.held[group] = length
            self._used += length - had
        for cut in policy.trims(self._used > self._capacity, turn.at):
            self._take(cut, turn.at)
        pinned = (group,) if forced else ()
        while self._used > self._capacity:  # a pinned group loses its own tail when it is alone
            self._take(policy.victim(pinned, turn.at) or Cut(group), turn.at)
        return turn.prompt - (had if had < shared else shared)

    def _take(self, cut: Cut, now: float) -> None:
        """Remove blocks from a group's tail: down to `keep` if the cut is whole, else as many as needed."""
        group, keep, whole = cut
        had = self.held.get(group, 0)
        left = keep if whole else max(keep, had - (self._used - self._capacity))
        if left >= had:
            assert whole, f"{self._policy.name} must not name a cut that frees nothing"
            return
        self._used -= had - left
        if left:
            self.held[group] = left
        else:
            del self.held[group]
        self._policy.held(group, left, left, now)
        if self._on_evict is not None:
            self._on_evict(group, had - left)
