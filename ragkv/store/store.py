"""The store: a stack of tiers, opened from settings, with what keeps it in order.

What a question needs is in `stack.py`. Here are durable writes, deletion, the sweep of entries that
nobody may use any more (`gc`), and what the store says of itself. A durable write and a deletion
wait for every tier, also for a remote one.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import inf
from pkgutil import resolve_name

from ragkv.config import StoreConfig

from .entry import EncodedEntry, Entry, EntryInfo, EntryKey, Identity
from .policies import PolicySettings, make_policy
from .stack import TierStack, or_none
from .tiers import DiskTier, MemoryTier, ReadOnlyDiskTier, Tier, TierKind, TierStats


@dataclass(frozen=True, slots=True)
class StoreStats:
    """What the store holds, and what happened since it was opened."""

    tiers: tuple[TierStats, ...]  # fastest first
    pending_bytes: int  # waiting to be written, or to be promoted
    # entries not written to a tier below memory: the write buffer was full, or the write failed
    dropped_writes: int
    prefetched: int = 0  # entries copied to the fastest tier for waiting requests


class Store(TierStack):
    """The stack of tiers that an engine owns. All methods are thread-safe."""

    @classmethod
    def open(
        cls, config: StoreConfig, *, page_locked: bool = False, block_tokens: int = 256
    ) -> "Store":
        """The store that `config` describes: memory (unless 0 bytes), disk (if a directory is
        given), Redis, S3.

        A read-only store has its own memory tier, and may serve from it what the writer has deleted
        since. Raises `StoreLockedError`, `StoreError`, `ConfigError` or `MissingExtraError`.
        Connects to no remote server yet.
        """
        tiers: list[Tier] = []
        xi_blocks = config.xi_tokens // block_tokens
        threshold = config.threshold_tokens
        settings = PolicySettings(
            xi_blocks=xi_blocks, block_tokens=block_tokens, threshold_tokens=threshold
        )
        if config.memory_bytes:
            tiers.append(
                MemoryTier(config.memory_bytes, make_policy(config.policy, settings), page_locked)
            )
        if config.directory is not None and config.read_only:
            tiers.append(ReadOnlyDiskTier(config.directory))
        elif config.directory is not None:
            tiers.append(
                DiskTier(config.directory, config.disk_bytes, make_policy(config.policy, settings))
            )
        if config.redis is not None or config.s3 is not None:
            # by name: that room is above this one, and nobody with one machine imports it
            tiers.extend(resolve_name("ragkv.cluster:open_remote")(config))
        buffer_bytes = config.write_buffer_bytes
        return cls(
            tiers,
            write_buffer_bytes=buffer_bytes,
            page_locked=page_locked,
            prefetch=config.prefetch,
        )

    def put_durably(self, entry: Entry) -> bool:
        """Store `entry` in every tier that answers, then return whether a tier below memory has it.

        Raises `StoreReadOnlyError` if a tier is read-only.
        """
        encoded = EncodedEntry.of(entry).compact(self._page_locked)
        stored = [or_none("store an entry", tier.put, encoded) for tier in self._durable]
        if self._durable != self._tiers and (not any(stored) or self._in_memory(encoded)):
            self._put_in_memory(encoded)
        return any(stored)

    def ensure_durable(self, identity: Identity, token_ids: Sequence[int]) -> bool:
        """Whether a tier below memory has the entry. If one has it, the entry is copied to those
        that lack it.
        """
        key = identity.key(token_ids)
        lacking = [tier for tier in self._durable if not tier.contains(key)]
        if not lacking or len(lacking) == len(self._durable):
            return not lacking
        lease = self.lease(identity, token_ids)
        if lease is None:
            return False
        with lease:
            entry = or_none("read an entry", lease.read_encoded)
        if entry is None:
            return False
        for tier in lacking:
            if not tier.read_only:
                or_none("store an entry", tier.put, entry)
        return True

    def delete(self, key: EntryKey) -> bool:
        """Drop `key` from every tier and from the write buffer; whether it was anywhere.

        After this returns, no tier of this process has it, and no running write or copy brings it
        back. A remote tier that does not answer serves it no more, and deletes it as soon as it
        answers. Raises `StoreReadOnlyError` if a tier is read-only.
        """
        return self._delete(key, self._tiers)

    def delete_here(self, key: EntryKey) -> bool:
        """Drop `key` from the tiers of this machine alone; whether it was there. Waits for no
        remote tier.
        """
        return self._delete(key, self._local)

    def gc(self, keep: Callable[[Identity], bool]) -> int:
        """Drop every entry whose identity `keep` refuses from every tier; the bytes freed, over all
        tiers.
        """
        self.flush()
        with self._promoter.deleting():
            return sum(tier.gc(keep) for tier in self._tiers)

    def refused(self, keep: Callable[[Identity], bool]) -> set[EntryKey]:
        """The keys that `gc` would drop."""
        self.flush()
        return {key for tier in self._tiers for key in tier.refused(keep)}

    def infos(self) -> Iterator[EntryInfo]:
        """The entries in all tiers, each key once, in no particular order. Does not count
        as a use.
        """
        seen: set[EntryKey] = set()
        for tier in self._tiers:
            for info in tier.infos():
                if info.key not in seen:
                    seen.add(info.key)
                    yield info

    def sample(self, count: int | None = None) -> list[EntryInfo]:
        """At most `count` of the entries that are stored on this machine, or all; asks no remote
        tier.
        """
        return list(
            itertools.islice((info for tier in self._local for info in tier.infos()), count)
        )

    def block_keys(self) -> list[EntryKey]:
        """The keys of the blocks of conversations that are stored on this machine. Reads
        no file.
        """
        return [key for tier in self._local for key in tier.block_keys()]

    def is_durable(self, key: EntryKey) -> bool:
        """Whether every tier below memory has `key`."""
        return all(tier.contains(key) for tier in self._durable)

    def room_bytes(self) -> float:
        """How much the fullest tier below memory takes without an eviction; infinite for one that
        counts no bytes.
        """
        stats = [tier.stats() for tier in self._durable]
        return min(
            inf if one.capacity_bytes is None else one.capacity_bytes - (one.used_bytes or 0)
            for one in stats
        )

    def leave_disk(self, size_bytes: int) -> None:
        """Leave so many of `disk_bytes` to what lies next to the entries, such as documents."""
        for tier in self._local:
            if isinstance(tier, DiskTier):
                tier.leave(size_bytes)

    def give_way(self) -> bool:
        """Give up entries on disk, because it is full; whether that freed any space."""
        freed = [tier.give_way() for tier in self._local if isinstance(tier, DiskTier)]
        return sum(freed) > 0

    def stats(self) -> StoreStats:
        """Counts and bytes of every tier and of the background threads."""
        tiers = tuple(tier.stats() for tier in self._tiers)
        return StoreStats(
            tiers, self._writers.pending_bytes, self._writers.dropped, self._prefetcher.fetched
        )

    @property
    def _durable(self) -> tuple[Tier, ...]:
        """The tiers that outlive the process; memory if there is no other."""
        return (
            tuple(tier for tier in self._tiers if tier.kind is not TierKind.MEMORY) or self._tiers
        )

    def _delete(self, key: EntryKey, tiers: Sequence[Tier]) -> bool:
        found = self._writers.discard(key)
        deleted = self._delete_from(tiers, key)
        if self._writers.discard(key):  # a promotion submitted a write between the two
            deleted |= self._delete_from(tiers, key)
        return found or deleted

    def _delete_from(self, tiers: Sequence[Tier], key: EntryKey) -> bool:
        with self._promoter.deleting(key):
            deleted = [tier.delete(key) for tier in tiers]
        return any(deleted)
