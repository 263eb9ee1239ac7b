"""A bounded tier of sizes under one policy."""

from collections.abc import Callable

from ragkv.store.policies import Eviction, Policy, TurnSize

from .policies import Trimming

OnEvict = Callable[[str, int], None]  # called with a group and how much it loses


class PrefixTier:
    """Holds the first blocks of each conversation, as numbers only; if `whole`, a group is held
    whole or not at all.
    """

    def __init__(
        self, policy: Policy, capacity: int, on_evict: OnEvict | None = None, whole: bool = False
    ) -> None:
        self.policy = policy
        self.capacity = capacity  # a change takes effect with the next turn
        self.held: dict[str, int] = {}
        self._used = 0
        self._on_evict = on_evict
        self._whole = whole

    def serve(self, turn: TurnSize, forced: bool = False) -> int:
        """Serve one turn; returns its uncached blocks b = in - min(X, sh).

        Sets X := L, then evicts while more than `capacity` blocks are held. The served
        conversation's own blocks may be evicted too (optional caching), unless caching is `forced`.
        """
        had = self.held.get(turn.group, 0)
        self.policy.turn_prefilled(turn)
        if turn.length != had:
            self._set(turn.group, turn.length, turn.at)
        for eviction in self.policy.trims() if isinstance(self.policy, Trimming) else ():
            self._take(eviction, turn.at)
        leased = (turn.group,) if forced else ()
        while self._used > self.capacity:  # a leased group loses its own tail when it is alone
            self._take(
                self.policy.victim(leased, turn.at) or Eviction(next(iter(self.held))), turn.at
            )
        return turn.prompt - min(had, turn.shared)

    def _take(self, eviction: Eviction, now: float) -> None:
        """Remove blocks from a group's tail: down to `keep` if `whole`, else as many as
        needed.
        """
        group, keep, whole = eviction
        had = self.held.get(group, 0)
        left = keep if whole else max(keep, had - (self._used - self.capacity))
        left = 0 if self._whole else left
        if left >= had:
            assert whole, f"{type(self.policy).__name__} must not choose what frees nothing"
            return
        self._set(group, left, now)
        if self._on_evict is not None:
            self._on_evict(group, had - left)

    def _set(self, group: str, blocks: int, now: float) -> None:
        self._used += blocks - self.held.pop(group, 0)
        if blocks:
            self.held[group] = blocks
        self.policy.held(group, blocks, blocks, now)
