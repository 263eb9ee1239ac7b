"""The contract of an eviction policy. Metadata only: no torch, no bytes, no clock of its own.

A policy decides by *groups*: a conversation whose history is stored as numbered blocks, or a chunk
that stands alone (a group of one block). A tier holds a prefix of a group's blocks, and eviction
takes the tail first. The policy is told what happens (`served`, `held`, `used`) and asked what to
evict (`trims`, `victim`). It never evicts by itself: the tier's ledger, or the simulator, removes
the blocks and reports what is held afterwards. The live store and the simulator run the same policy
objects. Not thread-safe: the owner holds its lock.

Units: blocks count token blocks, sizes are bytes in the live store and blocks or tokens in the
simulator, times are seconds of one clock.
"""

from abc import ABC, abstractmethod
from collections.abc import Container, Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from ragkv.config import at_least

if TYPE_CHECKING:  # no torch
    from ..entry import EntryKey


class NextRequest(NamedTuple):
    """A conversation's next request, which only the simulator knows."""

    position: int  # its index among all requests in order of time
    prompt: int  # its prompt, blocks rounded up
    shared: int  # blocks of that prompt that are a prefix of what the conversation stored


NEVER = NextRequest(1 << 62, 0, 0)  # This stands for a conversation that does not return.


class TurnSize(NamedTuple):
    """One served request of a conversation, as policies see it: sizes in blocks, and no token."""

    at: float  # seconds
    request: int  # its number in the trace; 0 in a live store
    group: str  # the conversation
    prompt: int  # `in`: its prompt, blocks rounded up
    # `sh`: blocks of the prompt that are a prefix of what the conversation stored; 0 at the first
    # turn
    shared: int
    length: int  # `L`: full blocks of prompt and response, all that can be stored
    number: int = 1  # of the turn in its conversation, from 1
    since: float | None = None  # seconds since the conversation's previous turn; None at the first
    # None where the future is unknown: everywhere except in the simulator
    next: NextRequest | None = None


class Cut(NamedTuple):
    """Which group loses its tail: its blocks from the last down to number `keep`, as many as space
    is needed for.
    """

    group: str
    keep: int = 0
    whole: bool = False  # evict down to `keep` even if less space is needed


@dataclass(frozen=True, slots=True)
class Item:
    """One stored thing, as a tier's ledger knows it."""

    key: "EntryKey"
    size: int  # bytes
    group: str = ""  # the conversation it belongs to; "" for a chunk that stands alone
    index: int = 0  # the number of its block in the group


@dataclass(frozen=True, slots=True)
class PolicySettings:
    """Settings of all policies; each policy reads those it needs. What is None is learned from the
    turns seen.
    """

    xi_blocks: int = 0  # latency threshold: blocks that may be computed within the TTFT target
    block_tokens: int = 16  # B
    new_blocks: int | None = None  # Q^: blocks the next turn is expected to add
    new_blocks_seen: tuple[int, ...] = ()  # a sample of Q, for its distribution; (): learned
    threshold_tokens: int = 1024  # threshold-lru: shorter conversations are not kept
    # lambda of the paper's model: turns of a living conversation
    turn_rate_per_s: float | None = None
    end_rate_per_s: float | None = None  # mu of the paper's model: deaths of a living conversation
    # look-ahead eviction window, in waiting sessions; None: the whole queue
    window_groups: int | None = None

    def __post_init__(self) -> None:
        at_least(self, xi_blocks=0, block_tokens=1, new_blocks=0, threshold_tokens=0)
        at_least(self, window_groups=0)


class Policy(ABC):
    """Chooses what a full tier evicts."""

    name: ClassVar[str]

    def __init__(self, settings: PolicySettings | None = None) -> None:
        self.settings = settings or PolicySettings()

    def retarget(self, xi_blocks: int) -> None:
        """From the next turn on the latency threshold is `xi_blocks`."""
        self.settings = replace(self.settings, xi_blocks=xi_blocks)

    @abstractmethod
    def held(self, group: str, blocks: int, size: int, now: float) -> None:
        """The tier holds, or is about to hold, the first `blocks` blocks of `group`, `size` in all;
        0 blocks: none.

        Also called before `victim` for the block that needs space. Growing counts as a use.
        """

    @abstractmethod
    def victim(self, pinned: Container[str], now: float) -> Cut | None:
        """The next cut, of a held group that is not `pinned`; `None` if all are pinned. Changes no
        later decision.
        """

    def served(self, turn: TurnSize) -> None:  # noqa: B027
        """A conversation's turn was served. Called before its blocks are reported held; the group
        may be unknown.
        """

    def used(self, group: str, now: float) -> None:  # noqa: B027
        """A part of `group` was read. Unknown groups are ignored."""

    def trims(self, overflows: bool, now: float) -> Iterable[Cut]:
        """Cuts to make in full before `victim` is asked; `overflows`: whether the tier
        needs space.
        """
        return ()

    def queued(self, group: str) -> None:  # noqa: B027
        """A request of `group` joined the tail of the scheduler's queue (CachedAttention section
        3.3).
        """

    def left(self, group: str, position: int = 0) -> None:  # noqa: B027
        """A request of `group` left the queue, served or given up; `position` earlier requests of
        `group` still wait.

        Ignored if no such request had joined.
        """
