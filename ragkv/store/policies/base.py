"""The contract of an eviction policy. Metadata only: no torch, no bytes, no clock of its own.

A policy is told what happens (`inserted`, `used`, `removed`) and asked who goes next (`victim`). It never evicts by
itself: the tier calls `victim` until enough room is free, drops what it is given, and reports `removed`. The live store
and the trace simulator run the very same objects. Not thread-safe: the owner holds its lock.
"""

from abc import ABC, abstractmethod
from collections.abc import Container
from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True, slots=True)
class Item:
    """What a policy may know of a stored thing."""

    key: str
    size: int  # bytes in the live store, blocks in the simulator
    group: str = ""  # the conversation it belongs to; "" for a chunk that stands alone
    index: int = 0  # its place in the group, 0 first: a group is evicted from its tail
    cost_s: float = 0.0  # seconds to compute it again; 0 where nobody measured


class Policy(ABC):
    """Decides who goes when a tier is full."""

    name: ClassVar[str]

    @abstractmethod
    def inserted(self, item: Item, now: float) -> None:
        """`item` is in the tier now (also after its size changed). Its key was not there before."""

    @abstractmethod
    def used(self, key: str, now: float) -> None:
        """`key` served a request. Unknown keys are ignored."""

    @abstractmethod
    def removed(self, key: str) -> None:
        """`key` left the tier, by eviction or deletion. Unknown keys are ignored."""

    @abstractmethod
    def victim(self, pinned: Container[str], now: float) -> str | None:
        """The key to evict next, none of `pinned`; `None` if every key is pinned. Changes nothing."""

    def admits(self, item: Item, now: float) -> bool:
        """Whether to keep `item` at all. The default keeps everything."""
        return True
