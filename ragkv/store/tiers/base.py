"""The contract of a tier: a bounded place where entries live, and a lease through which one is read.

A lease pins its entry: while it is open the entry is neither evicted nor are its bytes reused. What a lease returns was
identified (identity and token ids) and checksummed before; otherwise it raises `EntryDamagedError`, the tier drops the
entry, and the caller treats it as a miss. All methods are thread-safe. Reads release the GIL.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass
from enum import Enum

import torch

from ragkv.runtime import Closing

from ..codecs import RAW
from ..encoded import EncodedEntry
from ..entry import Entry, EntryInfo, Identity
from ..policies import Turn


class TierKind(Enum):
    """Where an entry lies, fastest first."""

    MEMORY = "memory"
    DISK = "disk"
    REDIS = "redis"
    S3 = "s3"


@dataclass(frozen=True, slots=True)
class Speed:
    """How fast a tier far away is, as its own reads show."""

    latency_s: float  # of a lookup
    bytes_per_s: float


@dataclass(frozen=True, slots=True)
class RemoteStats:
    """How a tier far away is doing."""

    state: str  # of its circuit breaker: "closed" is well; "open" and "half-open": nobody asks it
    opened: int  # times the breaker opened
    failures: int  # calls that ended in an error, timeouts among them
    timeouts: int
    slow: int  # answers that took more than half the timeout
    skipped: int  # calls that were not made, as the breaker was open
    lost_s: float  # time spent in calls that failed
    pending_deletions: int  # deletions it has not confirmed yet
    latency_s: float | None = None  # of a lookup, lately; None: not measured
    bytes_per_s: float | None = None


@dataclass(frozen=True, slots=True)
class TierStats:
    """What a tier holds and did since it was opened."""

    kind: TierKind
    entries: int
    used_bytes: int
    capacity_bytes: int
    hits: int
    misses: int
    evictions: int
    damaged: int  # entries dropped because bytes, identity or checksum were wrong
    read_bytes: int
    written_bytes: int
    remote: RemoteStats | None = None  # of a tier far away


class Lease(Closing):
    """One entry held for reading. Use as a context manager."""

    info: EntryInfo
    kind: TierKind
    sensitivity: torch.Tensor | None  # (T, C) float16
    in_place: bool = False  # `read_layer` returns views of the tier's own storage and needs no `out`
    layers_per_read: int = 1  # layers that are best read at once

    @property
    def stored_bytes(self) -> int:
        """Bytes of keys and values as they are held, so of reading all layers once."""
        return self.info.size_bytes

    def prefetch(self) -> None:
        """Its layers will be read soon, in order: a tier far away begins to fetch."""

    @abstractmethod
    def read_layer(self, layer: int, out: torch.Tensor | None = None) -> torch.Tensor:
        """The layer slice (2, G, T, D) of `layer`, verified.

        Returns either `out` (contiguous, same shape and dtype, filled) or a view of the tier's own immutable storage:
        never write to the result. Raises `EntryDamagedError`; afterwards the tier no longer has the entry.
        """

    def read_layers(self, first: int, outs: Sequence[torch.Tensor | None]) -> list[torch.Tensor]:
        """As many layers as there are `outs`, from `first` on, each as `read_layer` has it."""
        return [self.read_layer(first + number, out) for number, out in enumerate(outs)]

    def read_encoded(self, page_locked: bool = False, before_read: Callable[[], None] = lambda: None) -> EncodedEntry:
        """The whole entry in memory of its own, as it is held, verified: to be put into another tier.

        `page_locked` asks for page-locked memory where CUDA is there. `before_read` is called before each read of
        layers; an exception from it ends the copy. Raises as `read_layer` does.
        """
        info = self.info
        shape = (info.layers, *info.shape)
        kv = torch.empty(shape, dtype=info.dtype, pin_memory=page_locked and torch.cuda.is_available())
        for layer, target in enumerate(kv):
            before_read()
            got = self.read_layer(layer, target)
            if got.data_ptr() != target.data_ptr():  # a view of the tier's own storage
                target.copy_(got)
        return EncodedEntry(info, RAW, kv, self.sensitivity)

    @abstractmethod
    def close(self) -> None:
        """Unpin. Twice is harmless."""


class Tier(ABC):
    """A bounded place where entries live."""

    kind: TierKind
    read_only: bool = False  # `put`, `delete` and `gc` raise `StoreReadOnlyError`
    arbitrates: bool = False  # `claim` is one among all replicas
    is_remote: bool = False  # any answer may take as long as its timeout; others may write and delete there as well

    @abstractmethod
    def lease(self, identity: Identity, token_ids: Sequence[int]) -> Lease | None:
        """Pin and open the entry of these tokens under this identity, or `None`. Counts as a use."""

    @abstractmethod
    def put(self, entry: Entry | EncodedEntry, protected: Set[str] = frozenset()) -> bool:
        """Keep `entry`, in its identity's codec, evicting others if needed; returns when it is as durable as can be.

        `False` if it was not kept (larger than the tier, everything pinned, not admitted, write failed: logged).
        An entry already there is left as it is and counts as kept.
        """

    def free(self, size_bytes: int) -> None:  # noqa: B027
        """Evict until so much is free, or what is left may not go: later puts up to it find their room made."""

    def queued(self, groups: Sequence[str]) -> None:  # noqa: B027
        """A request that will read these groups waits from now on: tell the policy (CachedAttention section 3.3)."""

    def left(self, places: Sequence[tuple[str, int]]) -> None:  # noqa: B027
        """A request waits no longer. Of each group it was to read: how many before it wait for the same."""

    def served(self, turn: Turn) -> None:  # noqa: B027
        """A conversation's turn was served: tell the policy, which may trim. Comes before the turn's blocks are put."""

    def look_up_ahead(self, keys: Sequence[str], on_missing: Callable[[Sequence[str]], None]) -> None:  # noqa: B027
        """These keys will be leased at once: a tier far away begins to look, and tells `missed` what it has not."""

    def claim(self, name: str, expires_s: float) -> str | None:
        """Be the one replica that does `name`: a token for `release`, or `None` if another is. Errors count as ours."""
        return ""

    def release(self, name: str, token: str) -> None:  # noqa: B027
        """End a claim; it ends by itself when it expires."""

    @abstractmethod
    def contains(self, key: str) -> bool:
        """Whether `key` is here now. Not a use."""

    @abstractmethod
    def delete(self, key: str) -> bool:
        """Drop `key`; `True` if it was here. Open leases stay readable, no new one is given."""

    @abstractmethod
    def infos(self) -> Iterator[EntryInfo]:
        """What is held, in no particular order. Not a use."""

    def gc(self, keep: Callable[[Identity], bool]) -> int:
        """Drop every entry whose identity `keep` refuses, and what no version of this code reads; bytes freed."""
        before = self.stats().used_bytes
        for info in list(self.infos()):
            if not keep(info.identity):
                self.delete(info.key)
        return before - self.stats().used_bytes

    def speed(self) -> Speed | None:
        """How fast a tier far away was lately; `None` where that is not measured."""
        return None

    @abstractmethod
    def stats(self) -> TierStats:
        """Counts and bytes."""

    @abstractmethod
    def close(self) -> None:
        """Flush and release. Twice is harmless."""
