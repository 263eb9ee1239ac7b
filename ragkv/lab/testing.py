"""Fakes of tiers that are slow or fail: ragkv is tested with them, and so can be what is built on it.

store = Store([ThrottledTier(MemoryTier(10**9, LRU()), bandwidth_bytes_per_s=1e9)], write_buffer_bytes=0)
"""

import threading
import time
from collections.abc import Callable, Container, Iterator, Sequence, Set
from enum import Enum

import torch

from ragkv.errors import EntryDamagedError
from ragkv.store import (
    EncodedEntry,
    Entry,
    EntryInfo,
    EntryKey,
    Identity,
    Lease,
    Speed,
    Tier,
    TierStats,
    TurnSize,
    WrappedLease,
)


class SharedBandwidth:
    """A bandwidth that transfers share: they go one after the other, in the order they were asked for. Thread-safe."""

    def __init__(self) -> None:
        self._free_at = 0.0  # when all transfers asked for so far will be through, on the monotonic clock
        self._lock = threading.Lock()

    def due_at(self, size_bytes: int, bytes_per_s: float) -> float:
        """Add a transfer; the monotonic time at which it will be through."""
        with self._lock:
            self._free_at = max(self._free_at, time.monotonic()) + size_bytes / bytes_per_s
            return self._free_at


def sleep_until(due_at: float) -> None:
    """Sleep until the monotonic time `due_at`, not at all if it is past."""
    time.sleep(max(0.0, due_at - time.monotonic()))


class WrappedTier(Tier):
    """A tier that passes every call on to another one; override `wrap` to change the leases it gives."""

    def __init__(self, tier: Tier) -> None:
        self.tier = tier
        self.kind = tier.kind
        self.read_only, self.is_remote = tier.read_only, tier.is_remote

    def wrap(self, lease: Lease) -> Lease:
        """The lease that a reader gets instead of `lease`."""
        return lease

    def lease(self, identity: Identity, token_ids: Sequence[int]) -> Lease | None:
        lease = self.tier.lease(identity, token_ids)
        return None if lease is None else self.wrap(lease)

    def put(self, entry: Entry | EncodedEntry, protected: Set[str] = frozenset()) -> bool:
        return self.tier.put(entry, protected)

    def free(self, size_bytes: int) -> None:
        self.tier.free(size_bytes)

    def queued(self, groups: Sequence[str]) -> None:
        self.tier.queued(groups)

    def left(self, places: Sequence[tuple[str, int]]) -> None:
        self.tier.left(places)

    def served(self, turn: TurnSize) -> None:
        self.tier.served(turn)

    def look_up_ahead(self, keys: Sequence[EntryKey], on_missing: Callable[[Sequence[EntryKey]], None]) -> None:
        self.tier.look_up_ahead(keys, on_missing)

    def contains(self, key: EntryKey) -> bool:
        return self.tier.contains(key)

    def delete(self, key: EntryKey) -> bool:
        return self.tier.delete(key)

    def scan(self) -> Iterator[tuple[EntryKey, EntryInfo | None]]:
        return self.tier.scan()

    def block_keys(self) -> list[EntryKey]:
        return self.tier.block_keys()

    def gc(self, keep: Callable[[Identity], bool]) -> int:
        return self.tier.gc(keep)

    def speed(self) -> Speed | None:
        return self.tier.speed()

    def stats(self) -> TierStats:
        return self.tier.stats()

    def close(self) -> None:
        self.tier.close()


class ThrottledTier(WrappedTier):
    """A tier whose reads take at least `latency_s`, and their bytes over the bandwidth that all reads share.

    With `writes` each `put` takes as long, on a bandwidth of its own.
    """

    def __init__(
        self, tier: Tier, bandwidth_bytes_per_s: float, latency_s: float = 0.0, *, writes: bool = False
    ) -> None:
        super().__init__(tier)
        self.bandwidth_bytes_per_s, self.latency_s, self.writes = bandwidth_bytes_per_s, latency_s, writes
        self._reads = SharedBandwidth()

    def wrap(self, lease: Lease) -> Lease:
        return _ThrottledLease(lease, self)

    def put(self, entry: Entry | EncodedEntry, protected: Set[str] = frozenset()) -> bool:
        due_at = time.monotonic() + self.latency_s + entry.size_bytes / self.bandwidth_bytes_per_s
        stored = self.tier.put(entry, protected)
        if self.writes:
            sleep_until(due_at)
        return stored

    def due_at(self, size_bytes: int) -> float:
        """The monotonic time at which a read of `size_bytes` that begins now ends."""
        return self._reads.due_at(size_bytes, self.bandwidth_bytes_per_s) + self.latency_s


class _ThrottledLease(WrappedLease):
    def __init__(self, lease: Lease, tier: ThrottledTier) -> None:
        super().__init__(lease)
        self._tier = tier

    def read_layer(self, layer: int, out: torch.Tensor | None = None) -> torch.Tensor:
        due_at = self._layer_due_at()
        read = self.lease.read_layer(layer, out)
        sleep_until(due_at)
        return read

    def read_encoded(self, page_locked: bool = False, before_read: Callable[[], None] = lambda: None) -> EncodedEntry:
        read = self.lease.read_encoded(page_locked)
        for _ in range(self.info.layers):
            before_read()
            sleep_until(self._layer_due_at())
        return read

    def _layer_due_at(self) -> float:
        return self._tier.due_at(self.stored_bytes // self.info.layers)


class Failure(Enum):
    """How a read fails."""

    DAMAGED = "damaged"  # as a tier's contract says: `EntryDamagedError`, and the tier no longer has the entry
    BROKEN = "broken"  # against the contract: a plain `OSError`, and the entry is still there


class FailingTier(WrappedTier):
    """A tier whose reads of the given layers fail; `layers` and `failure` may be changed at any time."""

    def __init__(self, tier: Tier, layers: Container[int], failure: Failure = Failure.DAMAGED) -> None:
        super().__init__(tier)
        self.layers, self.failure = layers, failure

    def wrap(self, lease: Lease) -> Lease:
        return _FailingLease(lease, self)


class _FailingLease(WrappedLease):
    def __init__(self, lease: Lease, tier: FailingTier) -> None:
        super().__init__(lease)
        self._tier = tier

    def read_layer(self, layer: int, out: torch.Tensor | None = None) -> torch.Tensor:
        self._check(layer)
        return self.lease.read_layer(layer, out)

    def read_encoded(self, page_locked: bool = False, before_read: Callable[[], None] = lambda: None) -> EncodedEntry:
        for layer in range(self.info.layers):
            self._check(layer)
        return self.lease.read_encoded(page_locked, before_read)

    def _check(self, layer: int) -> None:
        if layer not in self._tier.layers:
            return
        if self._tier.failure is Failure.BROKEN:
            raise OSError(f"layer {layer} fails on purpose")
        self._tier.delete(self.info.key)
        raise EntryDamagedError(self.info.key, f"layer {layer} is damaged on purpose")


__all__ = ["FailingTier", "Failure", "SharedBandwidth", "ThrottledTier", "WrappedLease", "WrappedTier", "sleep_until"]
