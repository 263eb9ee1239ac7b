"""The contract of an eviction policy. A policy sees metadata only: no torch, no bytes, no clock of
its own.

A policy decides by *groups*. A group is a conversation, whose history is stored as numbered blocks,
or a single chunk (a group of one block). A tier holds a prefix of a group's blocks, and eviction
takes the tail first. The policy is told what happens (`turn_prefilled`, `held`, `used`) and asked
what to evict (`victim`). It never evicts by itself: the tier's ledger, or the simulator, removes
the blocks and reports what is held afterwards. The live store and the simulator run the same policy
objects. Not thread-safe: the owner holds its lock.

Units: blocks count token blocks, sizes are bytes in the live store and blocks or tokens in the
simulator, times are seconds of one clock.
"""

from abc import ABC, abstractmethod
from collections.abc import Container
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from .inputs import PolicySettings, TurnSize

if TYPE_CHECKING:  # no torch
    from ..entry import EntryKey


class Eviction(NamedTuple):
    """Which group loses its tail: its blocks from the last down to number `keep`, as many as space
    is needed for.
    """

    group: str
    keep: int = 0
    whole: bool = False  # evict down to `keep` even if less space is needed


@dataclass(frozen=True, slots=True)
class Item:
    """One stored entry, as a tier's ledger knows it."""

    key: "EntryKey"
    size: int  # bytes
    group: str = ""  # the conversation it belongs to; "" for a chunk that stands alone
    index: int = 0  # the number of its block in the group


class Policy(ABC):
    """Chooses what a full tier evicts."""

    needs_target: ClassVar[bool] = False  # whether it is LRU as long as no threshold is set

    def __init__(self, settings: PolicySettings | None = None) -> None:
        self.settings = settings or PolicySettings()

    def retarget(self, xi_blocks: int) -> None:
        """From the next turn on the latency threshold is `xi_blocks`."""
        self.settings = replace(self.settings, xi_blocks=xi_blocks)

    @abstractmethod
    def held(self, group: str, blocks: int, size: int, now: float) -> None:
        """The tier holds the first `blocks` blocks of `group`, `size` in all; 0 blocks: none.
        Growing counts as a use.

        Called after every change. For a block that needs space it is called before `victim`, too,
        as if the block were there, and again if the block is refused.
        """

    @abstractmethod
    def victim(self, leased: Container[str], now: float) -> Eviction | None:
        """What goes next, of a held group that is not `leased`; `None` if all are leased. Changes
        no later decision. One that evicts nothing is an error, which ends the put.
        """

    def turn_prefilled(self, turn: TurnSize) -> None:  # noqa: B027
        """A turn's prompt is computed, and its answer begins. Called before its blocks are reported
        held. The turn may still be given up, and the group may be unknown.
        """

    def used(self, group: str, now: float) -> None:  # noqa: B027
        """A part of `group` was read. Unknown groups are ignored."""

    def queued(self, group: str, request: int) -> None:  # noqa: B027
        """A request of `group` joined the tail of the scheduler's queue (CachedAttention section
        3.3). Its number is higher than those of all that joined before.
        """

    def left(self, group: str, request: int) -> None:  # noqa: B027
        """A request of `group` left the queue, served or given up. Ignored if no such request had
        joined.
        """
