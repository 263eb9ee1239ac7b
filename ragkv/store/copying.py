"""Copies entries between tiers in the background: new ones to slower tiers, hits to faster ones.

A deleted entry must not come back through a copy that was under way. So a lookup remembers its time
(`now`), and a copy to a faster tier is dropped if its entry was deleted since. No copy has to ask a
remote tier whether it still has the entry.
"""

import logging
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import ParamSpec, TypeVar

from ragkv.errors import StoreReadOnlyError

from .entry import Entry, EntryInfo, EntryKey, Identity, StoredEntry
from .job_queue import Job, JobQueue
from .stored_form import stored_form
from .tiers import Lease, Tier, TierKind

log = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

# Whether an entry of so many tokens belongs in memory. It is also told whether a request used the
# entry, and whether memory has room.
MemoryRule = Callable[[int, bool, bool], bool]

REMEMBERED = 10_000  # So many deleted keys are remembered. An older lookup is not copied up.


class TierCopies:
    """One background thread for each tier, so that none waits for a server of another."""

    def __init__(self, tiers: Sequence[Tier], capacity_bytes: int) -> None:
        """The entries that wait for a tier have at most `capacity_bytes`."""
        self.tiers = tuple(tiers)
        # the first tier, if it is memory, and all others
        self.memory = next((tier for tier in tiers[:1] if tier.kind == TierKind.MEMORY), None)
        self.below = self.tiers if self.memory is None else self.tiers[1:]
        # those that new entries and copies go to, besides memory
        self.written = tuple(tier for tier in self.below if not tier.read_only)
        # The slowest tier first: a copy up from there submits writes to the faster tiers.
        self._threads = {
            tier.kind: JobQueue[StoredEntry](capacity_bytes, f"ragkv-to-{tier.kind}")
            for tier in reversed(tiers)
        }
        if len(self._threads) < len(tiers):
            raise ValueError(
                f"A store has one tier of a kind, not {', '.join(tier.kind for tier in tiers)}."
            )
        self.memory_rule: MemoryRule = lambda *_: True
        self.dropped = 0  # entries not written: the queue was full, or the write failed
        self._deleted: OrderedDict[EntryKey, int] = OrderedDict()  # by key, when it was deleted
        self._now = 0  # how many deletions there were
        self._forgotten = 0  # the last deletion that is not in `_deleted`
        self._being_deleted = Counter[EntryKey | None]()  # now; None: any key
        # held by the last step of a copy up, and never while a tier deletes: that may take long
        self._lock = threading.RLock()

    # Down

    def stored_form(self, entry: Entry | StoredEntry) -> StoredEntry:
        """The entry as all tiers hold it; a `StoredEntry` stays as it is."""
        return stored_form(entry, self.memory is not None and self.memory.page_locked)

    def write(self, tier: Tier, entry: StoredEntry, wait_s: float = 0.0) -> bool:
        """Write `entry` to `tier` in the background, unless it is there; `False` if it cannot. A
        failure is counted.
        """

        def write() -> None:
            if not or_none("write an entry", tier.put, entry):
                self._count_drop()

        key = entry.info.key
        # a remote tier's `put` checks it, in the background
        present = not tier.is_remote and tier.contains(key)
        job = Job(write, key, entry.size_bytes, entry)
        if present or self._threads[tier.kind].submit(job, wait_s):
            return True
        self._count_drop()
        return False

    def waiting(self, key: EntryKey) -> StoredEntry | None:
        """The entry of `key` that waits to be written, or `None`."""
        found = (thread.entry(key) for thread in self._threads.values())
        return next((entry for entry in found if entry is not None), None)

    @property
    def pending_bytes(self) -> int:
        """Bytes held by copies that are not done."""
        return sum(thread.pending_bytes for thread in self._threads.values())

    # Up

    def now(self) -> int:
        """The number of deletions so far. Take it before a lookup: `promote` compares it, and drops
        what was deleted since.
        """
        return self._now

    def promote(self, lease: Lease, depth: int, since: int) -> None:
        """Copy what was found in the tier of that number, `since`, to the tiers above it, in the
        background. Closes the lease.
        """
        key = lease.info.key
        wanted = self.in_memory(lease.info, lease.stored_bytes, used=True)
        above = self._above(depth, in_memory=wanted)

        def copy() -> None:
            try:
                if not above[0].is_remote and above[0].contains(key):
                    return
                entry = lease.read_entry()
            finally:
                lease.close()
            self._store(entry, above, since)

        job: Job[StoredEntry] = Job(copy, key, lease.stored_bytes, cancel=lease.close)
        fits = above and self._can_hold(above[0], lease.stored_bytes)
        if not fits or not self._threads[self.tiers[depth].kind].submit(job):
            lease.close()

    def fetch(self, identity: Identity, token_ids: Sequence[int]) -> bool:
        """Copy an entry up before its use; whether any tier has it."""
        since = self.now()
        entry, depth = self.read(identity, token_ids, 1)
        if entry is None:
            return False
        self._store(entry, self._above(depth, in_memory=True), since)
        return True

    def read(
        self, identity: Identity, token_ids: Sequence[int], depth: int = 0
    ) -> tuple[StoredEntry | None, int]:
        """An entry that waits to be written, or that of the fastest tier from number `depth` on;
        `None` if there is none. Then the number of that tier.
        """
        entry = self.waiting(identity.key(token_ids))  # memory may evict it before it is written
        while entry is None and depth < len(self.tiers):
            lease = self.tiers[depth].lease(identity, token_ids)
            if lease is None:
                depth += 1
                continue
            with lease:
                lease.prefetch()
                entry = lease.read_entry()
        return entry, depth

    def put_in_memory(self, entry: StoredEntry, *, needed: bool) -> None:
        """Put a new entry in memory if it belongs there, or if it is `needed` because no other tier
        takes it. A block of a conversation counts as used: its next turn reads it.
        """
        used = bool(entry.info.group)
        if self.memory is not None and (
            needed or self.in_memory(entry.info, entry.size_bytes, used=used)
        ):
            or_none("store an entry", self.memory.put, entry)

    def in_memory(self, info: EntryInfo, size_bytes: int, *, used: bool) -> bool:
        """Whether the rule wants an entry in memory; `False` if memory is no tier."""
        if self.memory is None:
            return False
        memory = self.memory.stats()
        room = (
            memory.capacity_bytes is None
            or (memory.used_bytes or 0) + size_bytes <= memory.capacity_bytes
        )
        return self.memory_rule(info.tokens, used, room)

    # Deletions

    @contextmanager
    def deleting(self, key: EntryKey | None = None) -> Iterator[None]:
        """During the block `key` is not copied up; without a key, nothing is. Nor is it afterwards,
        if it was looked up before the block ended. Other keys go on.
        """
        with self._lock:
            self._being_deleted[key] += 1
        try:
            yield
        finally:  # a deletion that failed may have dropped it from a faster tier
            with self._lock:
                self._being_deleted -= Counter([key])  # forgets a key at 0
                self._now += 1
                self._remember_deleted(key)

    def is_deleted(self, key: EntryKey, since: int) -> bool:
        """Whether `key` is being deleted, or was deleted after `since`. Also true of a `since` so
        long ago that the deletions after it are not all remembered.
        """
        with self._lock:
            is_now = bool(self._being_deleted[key] or self._being_deleted[None])
            return is_now or since < max(self._forgotten, self._deleted.get(key, 0))

    def _remember_deleted(self, key: EntryKey | None) -> None:
        """The caller holds `_lock`."""
        if key is None:
            self._forgotten = self._now
            return
        self._deleted[key] = self._now
        self._deleted.move_to_end(key)
        if len(self._deleted) > REMEMBERED:
            _, self._forgotten = self._deleted.popitem(last=False)

    def cancel(self, key: EntryKey) -> bool:
        """Cancel every job of `key`, and wait for the running ones; whether there were any."""
        found = [thread.cancel(key) for thread in self._threads.values()]
        return any(found)

    def flush(self) -> None:
        """Return when everything submitted so far is done."""
        for thread in self._threads.values():
            thread.flush()

    def close(self) -> None:
        """Finish the waiting jobs and stop."""
        for thread in self._threads.values():
            thread.close()

    def _above(self, depth: int, *, in_memory: bool) -> list[Tier]:
        """The tiers above number `depth` that take copies; memory only if it is wanted there."""
        return [
            tier
            for tier in self.tiers[:depth]
            if (in_memory if tier is self.memory else tier in self.written)
        ]

    @staticmethod
    def _can_hold(tier: Tier, size_bytes: int) -> bool:
        capacity = None if tier.is_remote else tier.stats().capacity_bytes
        return capacity is None or size_bytes <= capacity

    def _store(self, entry: StoredEntry, tiers: Sequence[Tier], since: int) -> None:
        """Put a copy in `tiers`, unless it was deleted `since`: in memory now, in others soon."""
        with self._lock:
            if self.is_deleted(entry.info.key, since):
                return
            for tier in tiers:
                if tier is self.memory:
                    tier.put(entry)
                else:
                    self.write(tier, entry)

    def _count_drop(self) -> None:
        with self._lock:
            self.dropped += 1


def or_none(what: str, action: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | None:
    """The action's result, or `None` after a logged failure. Raises `StoreReadOnlyError`, which the
    caller handles.
    """
    try:
        return action(*args, **kwargs)
    except StoreReadOnlyError:
        raise
    except Exception:  # a store failure never fails a request
        log.exception("The store could not %s; going on without.", what)
        return None
