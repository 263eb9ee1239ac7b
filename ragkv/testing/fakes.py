"""Fakes we test with, shipped so that others can test against ragkv: tiers that are slow, and tiers that fail.

store = Store([ThrottledTier(MemoryTier(10**9, LRU()), bandwidth_bytes_per_s=1e9)], write_buffer_bytes=0)
"""

import threading
import time
from collections.abc import Callable, Container, Iterator, Sequence, Set
from enum import Enum

import torch

from ragkv.errors import EntryDamagedError
from ragkv.store import EncodedEntry, Entry, EntryInfo, Identity, Lease, Speed, Tier, TierStats, Turn


class WrappedTier(Tier):
    """A tier that is another one but for the leases it gives: override `wrap`."""

    def __init__(self, tier: Tier) -> None:
        self.tier = tier
        self.kind = tier.kind
        self.read_only, self.is_remote, self.arbitrates = tier.read_only, tier.is_remote, tier.arbitrates

    def wrap(self, lease: Lease) -> Lease:
        """What a reader gets instead of `lease`."""
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

    def served(self, turn: Turn) -> None:
        self.tier.served(turn)

    def look_up_ahead(self, keys: Sequence[str], on_missing: Callable[[Sequence[str]], None]) -> None:
        self.tier.look_up_ahead(keys, on_missing)

    def claim(self, name: str, expires_s: float) -> str | None:
        return self.tier.claim(name, expires_s)

    def release(self, name: str, token: str) -> None:
        self.tier.release(name, token)

    def contains(self, key: str) -> bool:
        return self.tier.contains(key)

    def delete(self, key: str) -> bool:
        return self.tier.delete(key)

    def infos(self) -> Iterator[EntryInfo]:
        return self.tier.infos()

    def gc(self, keep: Callable[[Identity], bool]) -> int:
        return self.tier.gc(keep)

    def speed(self) -> Speed | None:
        return self.tier.speed()

    def stats(self) -> TierStats:
        return self.tier.stats()

    def close(self) -> None:
        self.tier.close()


class WrappedLease(Lease):
    """A lease that is another one but for `read_layer`; whole entries are copied by it, layer by layer, decoded."""

    def __init__(self, lease: Lease) -> None:
        self.info, self.kind, self.sensitivity = lease.info, lease.kind, lease.sensitivity
        self.in_place = lease.in_place
        self.lease = lease

    @property
    def stored_bytes(self) -> int:
        return self.lease.stored_bytes

    def prefetch(self) -> None:
        self.lease.prefetch()

    def read_layer(self, layer: int, out: torch.Tensor | None = None) -> torch.Tensor:
        return self.lease.read_layer(layer, out)

    def close(self) -> None:
        self.lease.close()


class ThrottledTier(WrappedTier):
    """A tier behind one pipe: each read takes at least `latency_s` plus its bytes over the bandwidth they all share.

    With `writes` so does each `put`, on a pipe of its own.
    """

    def __init__(
        self, tier: Tier, bandwidth_bytes_per_s: float, latency_s: float = 0.0, *, writes: bool = False
    ) -> None:
        super().__init__(tier)
        self.writes = writes
        self.bandwidth_bytes_per_s = bandwidth_bytes_per_s
        self.latency_s = latency_s
        self._free_at = 0.0  # when the pipe has carried everything asked for so far, on the monotonic clock
        self._lock = threading.Lock()

    def wrap(self, lease: Lease) -> Lease:
        return _ThrottledLease(lease, self)

    def put(self, entry: Entry | EncodedEntry, protected: Set[str] = frozenset()) -> bool:
        began = time.monotonic()
        kept = self.tier.put(entry, protected)
        due_at = began + self.latency_s + entry.size_bytes / self.bandwidth_bytes_per_s
        time.sleep(max(0.0, due_at - time.monotonic()) if self.writes else 0.0)
        return kept

    def due_at(self, size_bytes: int) -> float:
        """Take the pipe for `size_bytes` more; the time at which they will have arrived."""
        with self._lock:
            self._free_at = max(self._free_at, time.monotonic()) + size_bytes / self.bandwidth_bytes_per_s
            return self._free_at + self.latency_s


class _ThrottledLease(WrappedLease):
    def __init__(self, lease: Lease, pipe: ThrottledTier) -> None:
        super().__init__(lease)
        self._pipe = pipe

    def read_layer(self, layer: int, out: torch.Tensor | None = None) -> torch.Tensor:
        due_at = self._pipe.due_at(self.stored_bytes // self.info.layers)
        read = self.lease.read_layer(layer, out)
        time.sleep(max(0.0, due_at - time.monotonic()))
        return read

    def read_encoded(self, page_locked: bool = False, before_read: Callable[[], None] = lambda: None) -> EncodedEntry:
        read = self.lease.read_encoded(page_locked)
        for _ in range(self.info.layers):
            before_read()
            due_at = self._pipe.due_at(self.stored_bytes // self.info.layers)
            time.sleep(max(0.0, due_at - time.monotonic()))
        return read


class Failure(Enum):
    """How a read fails."""

    DAMAGED = "damaged"  # as the contract has it: `EntryDamagedError`, and the tier no longer has the entry
    BROKEN = "broken"  # as nobody expects it: a plain `OSError`, and the entry is still there


class FailingTier(WrappedTier):
    """A tier whose reads of the given layers fail; `layers` and `failure` may be changed at any time."""

    def __init__(self, tier: Tier, layers: Container[int], failure: Failure = Failure.DAMAGED) -> None:
        super().__init__(tier)
        self.layers = layers
        self.failure = failure

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


__all__ = ["FailingTier", "Failure", "ThrottledTier", "WrappedLease", "WrappedTier"]
