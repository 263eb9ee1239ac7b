"""The tier of the recipe in docs/extending.md: entries as byte strings in a dict.

A copy of this file in ragkv/store/tiers/ passes `make check` and the contract of a tier. So it
imports single modules, and none that is above the tiers.
"""

import logging
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch

from ragkv.errors import EntryDamagedError
from ragkv.store.entry import EntryInfo, EntryKey, Identity, StoredEntry
from ragkv.store.record import RecordHead, bytes_of, parse_head, record_of
from ragkv.store.tiers.base import UNLIMITED_BYTES, Tier, TierRequest
from ragkv.store.tiers.lease import StoredLease
from ragkv.store.tiers.stats import Counts, TierStats

log = logging.getLogger(__name__)


class ToyLease(StoredLease):
    """A record in memory. Nothing has to be released: the bytes are the lease's own."""

    kind = "toy"

    def __init__(self, tier: "ToyTier", head: RecordHead, record: bytes) -> None:
        super().__init__(head)
        self._tier = tier
        self._record = record

    def release(self) -> None:
        """Nothing is pinned."""

    def _read(self, layer: int, into: torch.Tensor) -> None:
        start = self._head.layer_start(layer)
        stored = self._record[start : start + self._head.layer_bytes]
        try:
            self._head.check_layer(layer, stored)
        except EntryDamagedError:
            self._tier.delete(self.info.key)
            raise
        bytes_of(into)[:] = stored
        self._tier.count(read_bytes=len(stored))


class ToyTier(Tier):
    """At most `capacity_bytes` of records; the one that was put first goes first."""

    kind = "toy"

    def __init__(self, capacity_bytes: int) -> None:
        self._capacity_bytes = capacity_bytes
        self._records: OrderedDict[EntryKey, bytes] = OrderedDict()
        self._used_bytes = 0  # of the records
        self._counts = Counts()
        self._lock = threading.Lock()

    def lease(self, identity: Identity, token_ids: Sequence[int]) -> ToyLease | None:
        key = identity.key(token_ids)
        with self._lock:
            record = self._records.get(key)
        if record is not None:
            try:
                head = parse_head(key, record, partial(_start, record))
                head.info.check(identity, token_ids)
                self.count(hits=1)
                return ToyLease(self, head, record)
            except EntryDamagedError as error:
                log.warning("%s", error)
                self.delete(key)
                self.count(damaged=1)
        self.count(misses=1)
        return None

    def put(self, entry: StoredEntry) -> bool:
        head, layers = record_of(entry)
        record = b"".join([head, *layers])
        with self._lock:
            if entry.info.key in self._records:
                return True
            if len(record) > self._capacity_bytes:
                return False
            self._records[entry.info.key] = record
            self._used_bytes += len(record)
            while self._used_bytes > self._capacity_bytes:
                _, first = self._records.popitem(last=False)
                self._used_bytes -= len(first)
                self._counts.evictions += 1
        self.count(written_bytes=len(record))
        return True

    def contains(self, key: EntryKey) -> bool:
        with self._lock:
            return key in self._records

    def delete(self, key: EntryKey) -> bool:
        with self._lock:
            record = self._records.pop(key, b"")
            self._used_bytes -= len(record)
            return bool(record)

    def scan(self) -> Iterator[tuple[EntryKey, EntryInfo | None]]:
        with self._lock:
            records = list(self._records.items())
        for key, record in records:
            try:
                head = parse_head(key, record, partial(_start, record))
            except EntryDamagedError:
                yield key, None
            else:
                yield key, head.info

    def stats(self) -> TierStats:
        with self._lock:
            held = len(self._records)
            counts = asdict(self._counts)
            return TierStats(self.kind, held, self._used_bytes, self._capacity_bytes, **counts)

    def scratch(self, folder: Path) -> "ToyTier":
        return ToyTier(UNLIMITED_BYTES)

    def close(self) -> None:
        """Nothing is open."""

    def count(self, **more: int) -> None:
        """Add to the counts."""
        with self._lock:
            for name, number in more.items():
                setattr(self._counts, name, getattr(self._counts, name) + number)


def _start(record: bytes, size: int) -> bytes:
    return record[:size]


def open_toy(asked: TierRequest) -> ToyTier:
    """What a row of `TIERS` names. The tests give it the disk's setting. A tier of yours reads its
    own, such as `asked.config.toy_bytes`.
    """
    return ToyTier(asked.config.disk_bytes)
