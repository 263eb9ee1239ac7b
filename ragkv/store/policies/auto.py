"""The T-LRU of a live store (ours): guarded, and trimming only as far as shadow caches show that trimming pays.

Every candidate threshold, among them 0 (which is LRU), has a shadow cache: integers only, of the tier's capacity. The
shadow with the least recent TEL leads, and the tier evicts as the leader's policy says. TEL is measured against the
target xi; without a target, against LRU's own 90th percentile (T-LRU paper, "sensitivity to the threshold").
"""

from bisect import insort
from collections import deque
from collections.abc import Container, Iterable
from dataclasses import replace

from .base import Cut, Policy, PolicySettings, TurnSize
from .lru import LRU
from .prefix_tier import PrefixTier
from .t_lru import GuardedTLRU

WINDOW = 1_000  # LRU's 90th percentile is taken over so many turns.
HALF_LIFE = 2_000  # After so many turns a shadow's TEL counts half.
LEAD = 0.97  # A challenger must have less than this share of the leader's TEL.
GRID_TOKENS = (1_000, 2_000, 4_000)  # These thresholds are tried where no target is given.


class AutomaticTLRU(Policy):
    """Follows the best of LRU and guarded T-LRU at one or several thresholds."""

    name = "t-lru-auto"

    def __init__(self, settings: PolicySettings | None = None) -> None:
        super().__init__(settings)
        block, target = self.settings.block_tokens, self.settings.xi_blocks
        grid = [target] if target else [tokens // block for tokens in GRID_TOKENS]
        self._policies: list[Policy] = [LRU(), *(self._candidate(xi) for xi in grid)]
        self._shadows = [PrefixTier(policy, 0) for policy in (LRU(), *(self._candidate(xi) for xi in grid))]
        self._tel = [0.0] * len(self._shadows)  # blocks, discounted
        self._leader = 0  # LRU, until another one does better
        self._recent: deque[int] = deque()  # LRU's uncached blocks of the last WINDOW turns
        self._sorted: list[int] = []  # the same, in order
        self._blocks: dict[str, int] = {}
        self._used = self._most = 0

    def retarget(self, xi_blocks: int) -> None:
        super().retarget(xi_blocks)
        for policy in (*self._policies[1:], *(shadow.policy for shadow in self._shadows[1:])):
            policy.retarget(xi_blocks)

    def served(self, turn: TurnSize) -> None:
        for policy in self._policies:
            policy.served(turn)
        # By default the threshold is the 90th percentile of LRU's uncached blocks.
        xi = self.settings.xi_blocks or (self._sorted[len(self._sorted) * 9 // 10] if self._sorted else 0)
        for number, shadow in enumerate(self._shadows):
            shadow.capacity = self._most if self.settings.capacity_blocks is None else self.settings.capacity_blocks
            uncached = shadow.serve(turn)
            self._tel[number] = self._tel[number] * 0.5 ** (1 / HALF_LIFE) + max(0, uncached - xi)
            if number == 0:
                self._record_lru(uncached)
        best = min(range(len(self._tel)), key=self._tel.__getitem__)
        if self._tel[best] < LEAD * self._tel[self._leader]:
            self._leader = best

    def used(self, group: str, now: float) -> None:
        for policy in self._policies:
            policy.used(group, now)

    def held(self, group: str, blocks: int, size: int, now: float) -> None:
        self._used += blocks - self._blocks.pop(group, 0)
        self._most = max(self._most, self._used)
        if blocks:
            self._blocks[group] = blocks
        for policy in self._policies:
            policy.held(group, blocks, size, now)

    def victim(self, pinned: Container[str], now: float) -> Cut | None:
        return self._policies[self._leader].victim(pinned, now)

    def trims(self, overflows: bool, now: float) -> Iterable[Cut]:
        return self._policies[self._leader].trims(overflows, now)

    def _candidate(self, xi: int) -> Policy:
        return GuardedTLRU(replace(self.settings, xi_blocks=xi))

    def _record_lru(self, uncached: int) -> None:
        self._recent.append(uncached)
        insort(self._sorted, uncached)
        if len(self._recent) > WINDOW:
            self._sorted.remove(self._recent.popleft())
