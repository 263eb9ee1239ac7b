"""The contract of a tier, a bounded place that holds entries, and what a tier says of itself.

All methods are thread-safe. See `lease.py` for how an entry is read.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from ..entry import EncodedEntry, Entry, EntryInfo, EntryKey, Identity
from ..policies import Policy, TurnSize
from .lease import Lease, TierKind


@dataclass(frozen=True, slots=True)
class RemoteStats:
    """Health of a remote tier."""

    answers: bool  # whether the last call was answered in time
    away_s: float  # seconds since the start in which it did not answer
    failures: int  # calls that ended in an error, timeouts included
    skipped: int  # calls not made because the breaker was open
    pending_deletions: int  # deletions that it has not confirmed yet


@dataclass(frozen=True, slots=True)
class TierStats:
    """What a tier holds, and what happened since it was opened."""

    kind: TierKind
    entries: int | None
    used_bytes: int | None
    # these three are None of shared storage, which counts and bounds itself
    capacity_bytes: int | None
    hits: int
    misses: int
    evictions: int
    damaged: int  # entries dropped because bytes, identity or checksum were wrong
    read_bytes: int
    written_bytes: int
    remote: RemoteStats | None = None  # of a remote tier


@dataclass(slots=True)
class Counts:
    """The counters of `TierStats`. Not thread-safe."""

    hits: int = 0
    misses: int = 0
    evictions: int = 0
    damaged: int = 0
    read_bytes: int = 0
    written_bytes: int = 0


class Tier(ABC):
    """A bounded place that holds entries."""

    kind: TierKind
    read_only: bool = False  # `put` and `delete`, and so `gc`, raise `StoreReadOnlyError`
    # a call may take as long as its timeout; other processes write and delete there as well
    is_remote: bool = False

    @abstractmethod
    def lease(self, identity: Identity, token_ids: Sequence[int]) -> Lease | None:
        """Pin and open the entry of these tokens under this identity, or `None`. Counts as
        a use.
        """

    @abstractmethod
    def put(self, entry: Entry | EncodedEntry) -> bool:
        """Store `entry` in its identity's codec, evicting others if needed; returns when it is
        durable.

        `False` if it was not stored: it is larger than the tier, everything is pinned, the policy
        did not admit it, or the write failed (logged). An entry that is here already is left
        unchanged and counts as stored.
        """

    def tell(self, action: Callable[[Policy], object]) -> None:  # noqa: B027
        """Let `action` tell the eviction policy something, if the tier has one."""

    def served(self, turn: TurnSize) -> None:  # noqa: B027
        """Tell the policy that a conversation's turn was served, before the turn's blocks are put.
        It may trim.
        """

    @abstractmethod
    def contains(self, key: EntryKey) -> bool:
        """Whether `key` is here now. Does not count as a use."""

    @abstractmethod
    def delete(self, key: EntryKey) -> bool:
        """Drop `key`; whether it was here. No new lease is given.

        Open leases of a tier of this machine stay readable. Those of shared storage may find the
        rest gone.
        """

    @abstractmethod
    def scan(self) -> Iterator[tuple[EntryKey, EntryInfo | None]]:
        """Every key held, in no particular order, with its `EntryInfo`, or `None` if this code
        cannot read the entry.

        Does not count as a use.
        """

    def block_keys(self) -> list[EntryKey]:
        """The keys of the blocks of conversations that a tier of this machine holds and
        may delete.
        """
        return []

    def infos(self) -> Iterator[EntryInfo]:
        """The readable entries of `scan`."""
        return (info for _, info in self.scan() if info is not None)

    def gc(self, keep: Callable[[Identity], bool]) -> int:
        """Drop every entry whose identity `keep` refuses, or that this code cannot read; the bytes
        freed, if known.
        """
        before = self.stats().used_bytes or 0
        for key in self.refused(keep):
            self.delete(key)
        return before - (self.stats().used_bytes or 0)

    def refused(self, keep: Callable[[Identity], bool]) -> list[EntryKey]:
        """The keys that `gc` would drop."""
        return [key for key, info in self.scan() if info is None or not keep(info.identity)]

    @abstractmethod
    def stats(self) -> TierStats:
        """Counts and bytes."""

    @abstractmethod
    def close(self) -> None:
        """Flush and release. Twice is harmless."""
