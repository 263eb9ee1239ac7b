"""Tiers that are slow or fail, for tests and benchmarks: each wraps an ordinary tier.

store = Store([ThrottledTier(MemoryTier(10**9, LRU()), bandwidth_bytes_per_s=1e9)],
write_buffer_bytes=0)
"""

import threading
import time
from collections.abc import Callable, Container, Sequence
from enum import Enum
from math import inf
from typing import Any

import torch

from ragkv.config import StoreConfig
from ragkv.errors import EntryDamagedError
from ragkv.store.entry import Identity, StoredEntry
from ragkv.store.opening import open_tiers
from ragkv.store.policies import LRU
from ragkv.store.store import Store
from ragkv.store.tiers import Lease, MemoryTier, Tier


class SharedBandwidth:
    """A bandwidth that transfers share: they go one after the other, in the order they were asked
    for. Thread-safe.
    """

    def __init__(self) -> None:
        # when all transfers asked for so far will be through, on the monotonic clock
        self._free_at = 0.0
        self._lock = threading.Lock()

    def due_at(self, size_bytes: int, bytes_per_s: float) -> float:
        """Add a transfer; the monotonic time at which it will be through."""
        with self._lock:
            self._free_at = max(self._free_at, time.monotonic()) + size_bytes / bytes_per_s
            return self._free_at


def sleep_until(due_at: float) -> None:
    """Sleep until the monotonic time `due_at`, not at all if it is past."""
    time.sleep(max(0.0, due_at - time.monotonic()))


def store_of(config: StoreConfig, wrap: Callable[[Tier], Any], block_tokens: int = 256) -> Store:
    """The store of `config`, whose tiers `wrap` may put into others: `Engine(..., store=...)`."""
    tiers = [wrap(tier) for tier in open_tiers(config, block_tokens=block_tokens)]
    buffer_bytes = config.write_buffer_bytes
    return Store(tiers, write_buffer_bytes=buffer_bytes, prefetch=config.prefetch)


def memory_below(kind: str = "below") -> MemoryTier:
    """A tier in memory of another kind, below the store's memory."""
    tier = MemoryTier(10**6, LRU())
    tier.kind = kind
    return tier


class WrappedTier:
    """A tier that passes every call on to another one; override `wrap` to change the leases it
    gives.
    """

    def __init__(self, tier: Tier) -> None:
        self.tier = tier

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tier, name)

    def wrap(self, lease: Lease) -> Any:
        """The lease that a reader gets instead of `lease`."""
        return lease

    def lease(self, identity: Identity, token_ids: Sequence[int]) -> Lease | None:
        lease = self.tier.lease(identity, token_ids)
        return None if lease is None else self.wrap(lease)


class WrappedLease(Lease):
    """A lease that passes every call on to another one."""

    def __init__(self, lease: Lease) -> None:
        self.lease = lease
        self.info = lease.info
        self.kind = lease.kind
        self.in_place = lease.in_place

    @property
    def stored_bytes(self) -> int:
        return self.lease.stored_bytes

    def prefetch(self) -> None:
        self.lease.prefetch()

    def read_layer(self, layer: int, out: torch.Tensor | None = None) -> torch.Tensor:
        return self.lease.read_layer(layer, out)

    def read_entry(self) -> StoredEntry:
        return self.lease.read_entry()

    def release(self) -> None:
        self.lease.close()


class HeldWrites(WrappedTier):
    """A tier whose writes wait for `go`; it may be set at first, and cleared later."""

    def __init__(self, tier: Tier) -> None:
        super().__init__(tier)
        self.waiting = threading.Event()
        self.too_long = False
        self.go = threading.Event()

    def put(self, entry: StoredEntry) -> bool:
        self.waiting.set()
        self.too_long |= not self.go.wait(60)
        return self.tier.put(entry)


class ThrottledTier(WrappedTier):
    """A tier whose reads take their bytes over the bandwidth that all reads share; with `writes`
    puts are as slow. Both may be changed at any time.
    """

    def __init__(
        self, tier: Tier, bandwidth_bytes_per_s: float = inf, *, writes: bool = False
    ) -> None:
        super().__init__(tier)
        self.bandwidth_bytes_per_s = bandwidth_bytes_per_s
        self.writes = writes
        self._reads = SharedBandwidth()

    def wrap(self, lease: Lease) -> Any:
        return _CheckedLease(lease, lambda _: self._due_at(lease))

    def put(self, entry: StoredEntry) -> bool:
        due_at = time.monotonic() + entry.size_bytes / self.bandwidth_bytes_per_s
        stored = self.tier.put(entry)
        if self.writes:
            sleep_until(due_at)
        return stored

    def _due_at(self, lease: Lease) -> float:
        return self._reads.due_at(
            lease.stored_bytes // lease.info.layers, self.bandwidth_bytes_per_s
        )


class Failure(Enum):
    """How a read fails."""

    # as a tier's contract says: `EntryDamagedError`, and the tier no longer has the entry
    DAMAGED = "damaged"
    BROKEN = "broken"  # against the contract: a plain `OSError`, and the entry is still there


class FailingTier(WrappedTier):
    """A tier whose reads of the given layers fail; `layers` and `failure` may be changed at any
    time.
    """

    def __init__(
        self, tier: Tier, layers: Container[int], failure: Failure = Failure.DAMAGED
    ) -> None:
        super().__init__(tier)
        self.layers = layers
        self.failure = failure

    def wrap(self, lease: Lease) -> Any:
        return _CheckedLease(lease, lambda layer: self._check(lease, layer))

    def _check(self, lease: Lease, layer: int) -> float:
        if layer not in self.layers:
            return 0.0
        if self.failure is Failure.BROKEN:
            raise OSError(f"layer {layer} fails on purpose")
        self.tier.delete(lease.info.key)
        raise EntryDamagedError(lease.info.key, f"layer {layer} is damaged on purpose")


class _CheckedLease(WrappedLease):
    """A lease that calls `check` before each layer; it may raise, or return a monotonic time at
    which the read ends.
    """

    def __init__(self, lease: Lease, check: Callable[[int], float]) -> None:
        super().__init__(lease)
        self._check = check

    def read_layer(self, layer: int, out: torch.Tensor | None = None) -> torch.Tensor:
        ends_at = self._check(layer)
        read = self.lease.read_layer(layer, out)
        sleep_until(ends_at)
        return read

    def read_entry(self) -> StoredEntry:
        for layer in range(self.info.layers):
            sleep_until(self._check(layer))
        return self.lease.read_entry()
