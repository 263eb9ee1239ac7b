"""The contract of a tier, a bounded place that holds entries, and of a lease, through which an
entry is read.

A lease of a tier of this machine pins its entry: while the lease is open, the entry is not evicted
and its bytes are not reused. Identity, token ids and checksums are verified before a lease returns
anything. If they are wrong, it raises `EntryDamagedError`, the tier drops the entry, and the caller
treats it as a miss. All methods are thread-safe. Reads release the GIL.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from enum import Enum

import torch

from ragkv.runtime import Closing

from ..entry import EncodedEntry, Entry, EntryInfo, EntryKey, Identity
from ..policies import Policy, TurnSize
from ..record import RecordHead


class TierKind(Enum):
    """Where an entry is stored, fastest first."""

    MEMORY = "memory"
    DISK = "disk"
    REDIS = "redis"
    S3 = "s3"


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

    def stats(
        self, kind: TierKind, entries: int | None, used_bytes: int | None, capacity: int | None
    ) -> TierStats:
        """These counters, with what the tier holds."""
        return TierStats(kind, entries, used_bytes, capacity, **asdict(self))


class Lease(Closing):
    """One entry held for reading. Use it as a context manager."""

    info: EntryInfo
    kind: TierKind
    # `read_layer` returns views of the tier's own storage and needs no `out`
    in_place: bool = False

    @property
    def stored_bytes(self) -> int:
        """Bytes of keys and values as they are stored, so the bytes of reading all layers once."""
        return self.info.size_bytes

    def prefetch(self) -> None:
        """Announce that all layers will be read in order: a remote tier begins to fetch them."""

    @abstractmethod
    def read_layer(self, layer: int, out: torch.Tensor | None = None) -> torch.Tensor:
        """The layer slice (2, G, T, D) of `layer`, verified.

        Returns either `out` (contiguous, same shape and dtype, filled) or a view of the tier's own
        immutable storage: never write to the result. Raises `EntryDamagedError`; the tier has then
        dropped the entry.
        """

    @abstractmethod
    def read_encoded(self) -> EncodedEntry:
        """A verified copy of the whole entry as it is stored, for another tier. Raises as
        `read_layer` does.
        """

    @abstractmethod
    def close(self) -> None:
        """Unpin the entry. Twice is harmless."""


class StoredLease(Lease):
    """What leases of disk and remote tiers share: stored layers, read by `_read`, decoded or in
    encoded form.
    """

    def __init__(self, head: RecordHead) -> None:
        """`head` is that of the entry's record, verified."""
        self.info = head.info
        self._head = head

    @property
    def stored_bytes(self) -> int:
        return self.info.layers * self._head.layer_bytes

    def read_layer(self, layer: int, out: torch.Tensor | None = None) -> torch.Tensor:
        """The slice (2, G, T, D), read into `out` or into a new host tensor; see
        `Lease.read_layer`.
        """
        info = self.info
        codec = self._head.codec
        target = torch.empty(info.shape, dtype=info.dtype) if out is None else out
        if codec.in_place and target.is_contiguous():
            self._read(layer, target)
            return target
        layout = codec.layout(info.shape, info.dtype)
        stored = torch.empty(layout.shape, dtype=layout.dtype)
        self._read(layer, stored)
        return codec.decode(stored, target)

    def read_encoded(self) -> EncodedEntry:
        info = self.info
        codec = self._head.codec
        layout = codec.layout(info.shape, info.dtype)
        layers = torch.empty((info.layers, *layout.shape), dtype=layout.dtype)
        for number, layer in enumerate(layers):
            self._read(number, layer)
        return EncodedEntry(info, codec, layers)

    @abstractmethod
    def _read(self, layer: int, into: torch.Tensor) -> None:
        """Fill the contiguous tensor `into` with the stored layer, verified and counted."""


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
