"""Durable writes: an entry is in the tiers below memory when the call returns.

Such a write waits for every tier, also for a remote one. Entries that are encoded ahead of
questions are written this way.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from .copying import TierCopies, or_none
from .entry import Entry, EntryKey, Identity
from .tiers import Tier


@dataclass(frozen=True, eq=False)
class DurableTiers:
    """The tiers that outlive the process; memory if there is no other."""

    tiers: tuple[Tier, ...]
    copies: TierCopies  # of the whole store

    def put(self, entry: Entry) -> bool:
        """Store `entry` in every tier that answers, and in memory if it belongs there; whether one
        of these tiers has it.

        Raises `StoreReadOnlyError` if a tier is read-only, where `Store.put` leaves it out: who
        wants an entry durable must learn that it is not.
        """
        to_store = self.copies.stored_form(entry)
        stored = [or_none("store an entry", tier.put, to_store) for tier in self.tiers]
        self.copies.put_in_memory(to_store, needed=not any(stored))
        return any(stored)

    def ensure(self, identity: Identity, token_ids: Sequence[int]) -> bool:
        """Whether one of these tiers has the entry. If one has it, the entry is copied to those
        that lack it.
        """
        key = identity.key(token_ids)
        since = self.copies.now()
        lacking = [tier for tier in self.tiers if not tier.contains(key)]
        if len(lacking) == len(self.tiers):  # also of a store without a tier
            return False
        if not lacking:
            return True
        entry, _ = or_none("read an entry", self.copies.read, identity, token_ids) or (None, 0)
        if entry is None:
            return False
        for tier in lacking:
            if tier in self.copies.written:
                or_none("store an entry", tier.put, entry)
        self.copies.put_in_memory(entry, needed=False)
        if self.copies.is_deleted(key, since):  # it may have been put after that
            for tier in self.copies.tiers:
                or_none("delete an entry", tier.delete, key)
            return False
        return True

    def has(self, key: EntryKey) -> bool:
        """Whether every one of these tiers has `key`; `False` without a tier."""
        return bool(self.tiers) and all(tier.contains(key) for tier in self.tiers)

    def room_bytes(self) -> float:
        """How much the fullest of these tiers takes without an eviction; infinite for one that
        counts no bytes, and 0 without a tier.
        """
        stats = [tier.stats() for tier in self.tiers]
        room = [
            inf if one.capacity_bytes is None else one.capacity_bytes - (one.used_bytes or 0)
            for one in stats
        ]
        return min(room, default=0)
