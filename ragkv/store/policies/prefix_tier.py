"""A bounded tier of block counts under one policy: for the simulator, and for the shadow caches of `auto`."""

from collections.abc import Callable

from .base import Cut, Policy, TurnSize

OnEvict = Callable[[str, int], None]  # called with a group and the number of blocks it loses


class PrefixTier:
    """Holds the first blocks of each conversation, as numbers only."""

    def __init__(self, policy: Policy, capacity: int, on_evict: OnEvict | None = None) -> None:
        self.policy = policy
        self.capacity = capacity  # blocks; a change takes effect with the next turn
        self.held: dict[str, int] = {}
        self._used = 0
        self._on_evict = on_evict

    def serve(self, turn: TurnSize, forced: bool = False) -> int:
        """Serve one turn; returns its uncached blocks b = in - min(X, sh).

        Sets X := L, then evicts while more than `capacity` blocks are held. The served conversation's own blocks may be
        evicted too (optional caching), unless caching is `forced`.
        """
        group, length, shared, policy = turn.group, turn.length, turn.shared, self.policy
        had = self.held.get(group, 0)
        policy.served(turn)
        if length != had:
            policy.held(group, length, length, turn.at)
            self.held[group] = length
            self._used += length - had
        for cut in policy.trims(self._used > self.capacity, turn.at):
            self._take(cut, turn.at)
        pinned = (group,) if forced else ()
        while self._used > self.capacity:  # a pinned group loses its own tail when it is alone
            self._take(policy.victim(pinned, turn.at) or Cut(group), turn.at)
        return turn.prompt - (had if had < shared else shared)

    def _take(self, cut: Cut, now: float) -> None:
        """Remove blocks from a group's tail: down to `keep` if the cut is whole, else as many as needed."""
        group, keep, whole = cut
        had = self.held.get(group, 0)
        left = keep if whole else max(keep, had - (self._used - self.capacity))
        if left >= had:
            assert whole, f"{self.policy.name} must not name a cut that frees nothing"
            return
        self._used -= had - left
        if left:
            self.held[group] = left
        else:
            del self.held[group]
        self.policy.held(group, left, left, now)
        if self._on_evict is not None:
            self._on_evict(group, had - left)
