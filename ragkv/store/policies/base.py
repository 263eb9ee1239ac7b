"""The contract of an eviction policy. Metadata only: no torch, no bytes, no clock of its own.

A policy thinks in *groups*: a conversation whose history is stored as numbered blocks, or a chunk that stands alone (a
group of one block). What is held of a group is a prefix of its blocks, and eviction takes the tail first. A policy is
told what happens (`served`, `held`, `used`) and asked who goes (`trims`, `victim`). It never evicts by itself: the
tier's ledger, or the simulator, takes the blocks and reports what is held then. The live store and the simulator run
the very same objects. Not thread-safe: the owner holds its lock.

Units: blocks count token blocks, sizes are bytes in the live store and blocks or tokens in the simulator, times are
seconds of one clock.
"""

from abc import ABC, abstractmethod
from collections.abc import Container, Iterable
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from ragkv.errors import ConfigError


class Next(NamedTuple):
    """A conversation's next request, which only a simulator knows."""

    position: int  # its number among all requests in order of time
    prompt: int  # its prompt, blocks rounded up
    shared: int  # blocks of it that are a prefix of what the conversation stored


NEVER = Next(1 << 62, 0, 0)  # the conversation does not return


class Turn(NamedTuple):
    """One served request of a conversation."""

    at: float  # seconds
    request: int  # its number in the trace
    group: str  # the conversation
    prompt: int  # `in`: its prompt, blocks rounded up
    shared: int  # `sh`: blocks of it that are a prefix of what the conversation stored; 0 at the first turn
    length: int  # `L`: full blocks of prompt and response, all that can be stored
    number: int = 1  # of the turn in its conversation, from 1
    since: float | None = None  # seconds since the conversation's previous turn; None at the first
    next: Next | None = None  # None where nobody knows, which is everywhere but in a simulator


class Cut(NamedTuple):
    """Whose tail goes: blocks of `group` from the last down to number `keep`, only as many as room is needed for."""

    group: str
    keep: int = 0
    whole: bool = False  # all of them, needed or not


@dataclass(frozen=True, slots=True)
class Item:
    """One stored thing, as a tier's ledger knows it."""

    key: str
    size: int  # bytes
    group: str = ""  # the conversation it belongs to; "" for a chunk that stands alone
    index: int = 0  # the number of its block in the group


@dataclass(frozen=True, slots=True)
class PolicySettings:
    """What policies may be given; each reads what it needs. What is None is learned from the turns seen."""

    xi_blocks: int = 0  # latency threshold: blocks that may be computed within the TTFT target
    block_tokens: int = 16  # B
    new_blocks: int | None = None  # Q^: blocks the next turn is expected to add
    new_blocks_seen: tuple[int, ...] = ()  # a sample of Q, for its distribution; (): learned
    threshold_tokens: int = 1024  # threshold-lru: shorter conversations are not kept
    guard_quantile: float = 0.95  # t-lru-guarded: idle beyond this quantile of return gaps goes first
    turn_rate_per_s: float | None = None  # lambda of the paper's model: turns of a living conversation
    end_rate_per_s: float | None = None  # mu of the paper's model: deaths of a living conversation
    capacity_blocks: int | None = None  # of the tier, for shadow caches; None: the largest amount held so far
    load_share: float = 1.0  # what a dropped block costs, of computing it: below 1 where a slower tier still holds it
    window_groups: int | None = None  # look-ahead eviction window, in waiting sessions; None: the whole queue
    window_bytes: int | None = None  # the same as C_mem + C_disk, where the size of a session is to be seen live

    def __post_init__(self) -> None:
        for name in ("xi_blocks", "new_blocks", "threshold_tokens", "capacity_blocks", "window_groups", "window_bytes"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise ConfigError(f"{name} is {value}; it must be at least 0.")
        if self.block_tokens < 1:
            raise ConfigError(f"block_tokens is {self.block_tokens}; it must be at least 1.")
        if not 0.0 < self.guard_quantile <= 1.0:
            raise ConfigError(f"guard_quantile is {self.guard_quantile}; it must lie in (0, 1].")
        if not 0.0 <= self.load_share <= 1.0:
            raise ConfigError(f"load_share is {self.load_share}; it must lie in [0, 1].")


class Policy(ABC):
    """Decides who goes when a tier is full."""

    name: ClassVar[str]
    offline: ClassVar[bool] = False  # needs `Turn.next`, which only a simulator has

    def __init__(self, settings: PolicySettings | None = None) -> None:
        self.settings = settings or PolicySettings()

    @abstractmethod
    def held(self, group: str, blocks: int, size: int, now: float) -> None:
        """Of `group` the first `blocks` blocks, `size` in all, are held now; 0: none. Growing is a use."""

    @abstractmethod
    def victim(self, pinned: Container[str], now: float) -> Cut | None:
        """The next cut, of a group held and none of `pinned`; `None` if every group is pinned. Changes no decision."""

    def served(self, turn: Turn) -> None:  # noqa: B027
        """A conversation's turn was served. Comes before its blocks are reported held; may be of an unknown group."""

    def used(self, group: str, now: float) -> None:  # noqa: B027
        """A part of `group` was read. Unknown groups are ignored."""

    def trims(self, overflows: bool, now: float) -> Iterable[Cut]:
        """Cuts to be taken in whole before any victim is asked for; `overflows`: whether room is needed."""
        return ()

    def queued(self, group: str) -> None:  # noqa: B027
        """A request of `group` joined the tail of the scheduler's queue (CachedAttention section 3.3)."""

    def started(self, group: str) -> None:
        """The first waiting request of `group` left the queue to be served."""
        self.left(group)

    def left(self, group: str, place: int = 0) -> None:  # noqa: B027
        """A request of `group` is out of the queue, served or given up; `place` requests of it joined before and wait.

        Of a request that never joined: ignored.
        """
