"""Policies that only the simulator runs: baselines of the papers' tables, and offline bounds, which
know the future.

FIFO is a baseline of CachedAttention (section 4.3.3), Threshold-LRU of the T-LRU paper. That
paper's ET-LRU (`et_lru.py`) loses to LRU where the store is large (docs/research/policies.md). The
bounds are Belady's furthest-in-future rule, tail-optimized Belady (theorem 1), and T-LRU that knows
which conversations do not return, or also the next turn's lengths (figure 5).
"""

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Container, Iterable
from pkgutil import resolve_name

from ragkv.errors import ConfigError
from ragkv.registry import POLICIES
from ragkv.store.policies import (
    LRU,
    NEVER,
    Eviction,
    Policy,
    PolicySettings,
    TurnSize,
    check_settings,
)
from ragkv.store.policies.lru import LookAhead, Ranking
from ragkv.store.policies.t_lru import TLRU, Departed

from .et_lru import ETLRU


class FIFO(LRU):
    """First in, first out (CachedAttention section 4.3.3): neither a use nor growth changes the
    order.
    """

    def used(self, group: str, now: float) -> None:
        pass

    def held(self, group: str, blocks: int, size: int, now: float) -> None:
        if blocks:
            self._held[group] = blocks
        else:
            self._held.pop(group, None)


class Belady(Policy):
    """Evicts the conversation whose next request is furthest; those that never return first.

    A group whose future is unknown counts as never returning, the longest unused first. Where
    conversations contract, blocks that the next prompt does not share still count as needed;
    `tail-belady` with xi 0 does better there.
    """

    def __init__(self, settings: PolicySettings | None = None) -> None:
        super().__init__(settings)
        # group -> (-position of its next request, number of its last use)
        self._next: dict[str, tuple[int, int]] = {}
        self._held = Ranking()
        self._uses = 0
        self._departed = Departed(self._forget)

    def turn_prefilled(self, turn: TurnSize) -> None:
        self._expect(turn.group, (turn.next or NEVER).position)

    def used(self, group: str, now: float) -> None:
        if group in self._held:
            self._expect(group, -self._next[group][0])

    def held(self, group: str, blocks: int, size: int, now: float) -> None:
        if not blocks:
            self._held.drop(group)
            if group in self._next:
                self._departed.add(group)
        elif group not in self._held:
            if group not in self._next:
                self._expect(group, NEVER.position)
            self._held.put(group, self._next[group])
            self._departed.discard(group)

    def victim(self, leased: Container[str], now: float) -> Eviction | None:
        first = self._held.first(leased)
        return None if first is None else Eviction(first[1])

    def _forget(self, group: str) -> None:
        del self._next[group]

    def _expect(self, group: str, position: int) -> None:
        self._uses += 1
        self._next[group] = -position, self._uses
        if group in self._held:
            self._held.put(group, self._next[group])
        else:
            self._departed.add(group)


class WindowedLookAhead(LookAhead):
    """Look-ahead eviction with the window of the paper: the first `window` sessions of the queue
    are exempt (CachedAttention section 3.3.2: as many as fit into memory and disk).
    """

    def __init__(self, window: int) -> None:
        super().__init__()
        self._window = window
        self._beyond: OrderedDict[tuple[str, int], None] = OrderedDict()  # requests behind it

    def queued(self, group: str, request: int) -> None:
        self._beyond[group, request] = None
        self._fill()

    def left(self, group: str, request: int) -> None:
        self._beyond.pop((group, request), None)
        super().left(group, request)
        self._fill()

    def _fill(self) -> None:
        while self._beyond:
            group, request = next(iter(self._beyond))
            if group not in self._waiting and len(self._waiting) >= self._window:
                return
            del self._beyond[group, request]
            super().queued(group, request)


class Trimming(ABC):
    """A policy that also evicts while there is room, which a live store does not ask for."""

    @abstractmethod
    def trims(self) -> Iterable[Eviction]:
        """What to evict in full when a turn has ended, before `victim` is asked."""


class TailBelady(Trimming, Belady):
    """Belady, keeping no more blocks than help the tail: min(sh_next, (in_next - xi)+). Optimal for
    TEL.
    """

    def __init__(self, settings: PolicySettings | None = None) -> None:
        super().__init__(settings)
        self._trim: Eviction | None = None  # of the conversation served last

    def turn_prefilled(self, turn: TurnSize) -> None:
        super().turn_prefilled(turn)
        self._trim = None
        if turn.next is not None:
            keep = max(0, min(turn.next.shared, turn.next.prompt - self.settings.xi_blocks))
            self._trim = Eviction(turn.group, keep, whole=True)

    def trims(self) -> Iterable[Eviction]:
        return () if self._trim is None else (self._trim,)


class ThresholdLRU(Trimming, LRU):
    """LRU that does not keep conversations of L B < `THRESHOLD_TOKENS` tokens: a baseline of the
    T-LRU paper, and OpenAI's published rule.
    """

    THRESHOLD_TOKENS = 1024

    def __init__(self, settings: PolicySettings | None = None) -> None:
        super().__init__(settings)
        self._short: str | None = None  # the conversation served last, if it is too short to keep

    def turn_prefilled(self, turn: TurnSize) -> None:
        super().turn_prefilled(turn)
        short = turn.length * self.settings.block_tokens < self.THRESHOLD_TOKENS
        self._short = turn.group if short else None

    def trims(self) -> Iterable[Eviction]:
        is_held = self._short is not None and self._short in self._held
        return [Eviction(self._short, whole=True)] if is_held else []


class EndAware(TLRU):
    """T-LRU that knows which conversations do not return, and keeps nothing of them."""

    def budget(self, turn: TurnSize) -> int:
        return 0 if turn.next is NEVER else super().budget(turn)


class LengthAware(TLRU):
    """T-LRU that knows the next turn's lengths too: budget min(sh_next, in_next - xi), 0 if it
    never comes.
    """

    def budget(self, turn: TurnSize) -> int:
        if turn.next is None:
            return super().budget(turn)
        return max(0, min(turn.next.shared, turn.next.prompt - self.settings.xi_blocks))


SIMULATOR_ONLY: dict[str, type[Policy]] = {
    "belady": Belady,
    "end-aware": EndAware,
    "et-lru": ETLRU,
    "fifo": FIFO,
    "length-aware": LengthAware,
    "tail-belady": TailBelady,
    "threshold-lru": ThresholdLRU,
}
ALL_POLICIES: dict[str, type[Policy]] = {
    name: resolve_name(place) for name, place in POLICIES.items()
} | SIMULATOR_ONLY


def make_any_policy(name: str, settings: PolicySettings | None = None) -> Policy:
    """A new policy by its name, of a live store or of the simulator alone; raises `ConfigError` for
    an unknown name, and what `check_settings` raises.
    """
    check_settings(settings)
    if name not in ALL_POLICIES:
        raise ConfigError(f"Unknown policy {name!r}. Known: {', '.join(sorted(ALL_POLICIES))}.")
    return ALL_POLICIES[name](settings)
