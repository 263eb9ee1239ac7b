"""The upkeep of a store: durable writes, deletions, its statistics, and the sweep of entries that
nobody may use any more (`gc`). Questions do not need it.

A durable write and a deletion wait for every tier, also for a remote one.
"""

import itertools
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from math import inf
from typing import TypeVar

from ragkv.errors import StoreError
from ragkv.runtime import Closing

from .copying import TierCopies, or_none
from .entry import EncodedEntry, Entry, EntryInfo, EntryKey, Identity
from .tiers import Lease, Tier

T = TypeVar("T")


class Upkeep(Closing):
    """The part of a `Store` that no question needs. All methods are thread-safe."""

    tiers: tuple[Tier, ...]  # fastest first
    _below: tuple[Tier, ...]  # the tiers below memory
    _local: tuple[Tier, ...]  # those of this machine
    _page_locked: bool
    _copies: TierCopies

    @abstractmethod
    def lease(self, identity: Identity, token_ids: Sequence[int]) -> Lease | None:
        """See `Store.lease`."""

    @abstractmethod
    def flush(self) -> None:
        """See `Store.flush`."""

    def put_durably(self, entry: Entry) -> bool:
        """Store `entry` in every tier that answers, then return whether a tier below memory has it.

        Raises `StoreReadOnlyError` if a tier is read-only.
        """
        encoded = EncodedEntry.of(entry).compact(self._page_locked)
        stored = [or_none("store an entry", tier.put, encoded) for tier in self._durable]
        if self._below:
            self._copies.put_in_memory(encoded, needed=not any(stored))
        return any(stored)

    def ensure_durable(self, identity: Identity, token_ids: Sequence[int]) -> bool:
        """Whether a tier below memory has the entry. If one has it, the entry is copied to those
        that lack it.
        """
        key = identity.key(token_ids)
        lacking = [tier for tier in self._durable if not tier.contains(key)]
        if len(lacking) == len(self._durable):  # also of a store without a tier
            return False
        if not lacking:
            return True
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

    def is_durable(self, key: EntryKey) -> bool:
        """Whether every tier below memory has `key`; `False` without a tier."""
        return bool(self.tiers) and all(tier.contains(key) for tier in self._durable)

    def room_bytes(self) -> float:
        """How much the fullest tier below memory takes without an eviction; infinite for one that
        counts no bytes, and 0 without a tier.
        """
        stats = [tier.stats() for tier in self._durable]
        room = [
            inf if one.capacity_bytes is None else one.capacity_bytes - (one.used_bytes or 0)
            for one in stats
        ]
        return min(room, default=0)

    def delete(self, key: EntryKey) -> bool:
        """Drop `key` from every tier and from the write buffer; whether it was anywhere.

        After this returns, no tier of this process has it, and no running write or copy brings it
        back. A remote tier that does not answer serves it no more, and deletes it as soon as it
        answers. Raises `StoreReadOnlyError` if a tier is read-only.
        """
        return self._delete(key, self.tiers)

    def delete_here(self, key: EntryKey) -> bool:
        """Drop `key` from the tiers of this machine alone; whether it was there. Waits for no
        remote tier.
        """
        return self._delete(key, self._local)

    def gc(self, keep: Callable[[Identity], bool]) -> int:
        """Drop every entry whose identity `keep` refuses, or that this code cannot read, from every
        tier; the bytes freed, over all tiers that count them.
        """
        self.flush()
        before = self._used_bytes()
        with self._copies.deleting():
            for tier in self.tiers:
                for key in _refused(tier, keep):
                    tier.delete(key)
        return before - self._used_bytes()

    def refused(self, keep: Callable[[Identity], bool]) -> set[EntryKey]:
        """The keys that `gc` would drop."""
        self.flush()
        return {key for tier in self.tiers for key in _refused(tier, keep)}

    def leave_disk(self, size_bytes: int) -> None:
        """Leave so many of `disk_bytes` to what lies next to the entries, such as documents."""
        for tier in self._local:
            tier.leave(size_bytes)

    def give_way(self) -> bool:
        """Give up entries on disk, because it is full; whether that freed any space."""
        freed = [tier.give_way() for tier in self._local]
        return sum(freed) > 0

    def infos(self) -> Iterator[EntryInfo]:
        """The entries in all tiers, each key once, in no particular order. Does not count
        as a use.
        """
        seen: set[EntryKey] = set()
        for tier in self.tiers:
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

    @property
    def _durable(self) -> tuple[Tier, ...]:
        """The tiers that outlive the process; memory if there is no other."""
        return self._below or self.tiers

    def _used_bytes(self) -> int:
        return sum(tier.stats().used_bytes or 0 for tier in self.tiers)

    def _delete(self, key: EntryKey, tiers: Sequence[Tier]) -> bool:
        found = self._copies.discard(key)
        deleted = self._delete_from(tiers, key)
        if self._copies.discard(key):  # a copy up submitted a write between the two
            deleted |= self._delete_from(tiers, key)
        return found or deleted

    def _delete_from(self, tiers: Sequence[Tier], key: EntryKey) -> bool:
        with self._copies.deleting(key):
            return deleted_everywhere(tiers, lambda tier: tier.delete(key)) > 0


def deleted_everywhere(places: Iterable[T], delete: Callable[[T], bool]) -> int:
    """In how many of `places` there was something to delete. An error in one place keeps no other
    from being asked: the first one is raised at the end.
    """
    count = 0
    errors = []
    for place in places:
        try:
            count += delete(place)
        except StoreError as error:
            errors.append(error)
    if errors:
        raise errors[0]
    return count


def _refused(tier: Tier, keep: Callable[[Identity], bool]) -> list[EntryKey]:
    return [key for key, info in tier.scan() if info is None or not keep(info.identity)]
