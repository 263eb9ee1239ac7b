"""The store: a stack of tiers, fastest first. Finds entries, reads, writes, deletes and counts them.

A lookup asks the tiers in order. A hit in a slower tier is copied to the faster ones in the
background (`copying.py`). A put stores in memory at once; the disk and shared storage are written in
the background. A `Placement` may keep entries out of memory. The scheduler announces waiting
requests (`queued`, `started`, `left`): policies protect their entries, and `prefetch.py` copies them
up before the requests start. A caller waits for a remote tier only if it reads from it, or deletes.
A store failure never fails a request: it is logged and counts as a miss (CacheBlend section 5.1, "KV
cache store").
"""

import atexit
import itertools
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from math import inf
from typing import ParamSpec, TypeVar

from ragkv.config import StoreConfig
from ragkv.errors import StoreReadOnlyError
from ragkv.runtime import Closing

from .copying import Placement, TierCopies
from .entry import EncodedEntry, Entry, EntryInfo, EntryKey, Identity
from .opening import open_tiers
from .policies import TurnSize
from .prefetch import Prefetcher, PrefetchHint
from .tiers import Lease, MemoryLease, Tier, TierKind, TierStats

log = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class StoreStats:
    """What the store holds, and what happened since it was opened."""

    tiers: tuple[TierStats, ...]  # fastest first
    pending_bytes: int  # waiting to be written, or to be promoted
    # entries not written to a tier below memory: the write buffer was full, or the write failed
    dropped_writes: int
    prefetched: int = 0  # entries copied to the fastest tier for waiting requests
    announced: int = 0  # requests that wait, or have not opened their entries yet


class Store(Closing):
    """The stack of tiers that an engine owns. All methods are thread-safe."""

    def __init__(
        self,
        tiers: Sequence[Tier],
        *,
        write_buffer_bytes: int,
        page_locked: bool = False,
        prefetch: bool = True,
    ) -> None:
        """A store that owns `tiers`, opened. `page_locked`: entries in memory are page-locked where
        CUDA is there.

        If the first of several tiers is memory, `prefetch` copies the entries of waiting requests
        up.
        """
        self.tiers = tuple(tiers)
        has_memory = bool(tiers) and tiers[0].kind is TierKind.MEMORY
        self._memory = self.tiers[0] if has_memory else None
        self._below = self.tiers[has_memory:]
        self._local = tuple(tier for tier in self.tiers if not tier.is_remote)
        self._remote = tuple(tier for tier in self.tiers if tier.is_remote)
        self._page_locked = page_locked
        self._copies = TierCopies(self.tiers, write_buffer_bytes)
        copies_up = has_memory and bool(self._below) and prefetch
        self._prefetcher = Prefetcher(self.tiers, self._copies.fetch if copies_up else None)
        atexit.register(self.close)

    @classmethod
    def open(
        cls,
        config: StoreConfig,
        *kinds: TierKind,
        page_locked: bool = False,
        block_tokens: int = 256,
    ) -> "Store":
        """The store that `config` describes (`opening.py`), or only its tiers of some kinds.

        A read-only store has its own memory tier, and may serve from it what the writer has deleted
        since. Raises `StoreLockedError`, `StoreError`, `ConfigError` or `MissingExtraError`.
        Connects to no remote server yet.
        """
        return cls(
            open_tiers(config, page_locked, block_tokens, *kinds),
            write_buffer_bytes=config.write_buffer_bytes,
            page_locked=page_locked,
            prefetch=config.prefetch,
        )

    # Finding and storing

    def lease(self, identity: Identity, token_ids: Sequence[int]) -> Lease | None:
        """Pin and open the entry of these tokens in the fastest tier that has it, or `None`.

        A hit below the fastest tier is copied up after the lease is closed.
        """
        key = identity.key(token_ids)
        since = self._copies.now()
        # before the lookup: if its write ends meanwhile, a tier has it
        waiting = self._copies.waiting(key)
        for depth, tier in enumerate(self.tiers):
            lease = or_none("look up an entry", tier.lease, identity, token_ids)
            if lease is not None:
                if depth:
                    lease.leave_to(partial(self._copies.promote, depth=depth, since=since))
                return lease
        if waiting is not None and waiting.info.matches(identity, token_ids):
            return MemoryLease(waiting)
        return None

    def contains(self, key: EntryKey) -> bool:
        """Whether `key` is in a tier or waits to be written. Does not count as a use."""
        return self._copies.waiting(key) is not None or any(
            tier.contains(key) for tier in self.tiers
        )

    def put(self, entry: Entry, wait_s: float = 0.0) -> None:
        """Store `entry`: in memory at once, in the tiers below soon. Waits for a disk or a server
        `wait_s` at most.

        A write buffer that stays full drops the write and counts it. The caller must not write to
        the entry's tensors afterwards.
        """
        encoded = EncodedEntry.of(entry).compact(self._page_locked)
        below = [tier for tier in self._below if not tier.read_only]
        written = [self._copies.write(tier, encoded, wait_s) for tier in below]
        self._put_in_memory(encoded, needed=not any(written))

    def put_durably(self, entry: Entry) -> bool:
        """Store `entry` in every tier that answers, then return whether a tier below memory has it.

        Raises `StoreReadOnlyError` if a tier is read-only.
        """
        encoded = EncodedEntry.of(entry).compact(self._page_locked)
        stored = [or_none("store an entry", tier.put, encoded) for tier in self._durable]
        if self._below:
            self._put_in_memory(encoded, needed=not any(stored))
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

    # Deleting

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

    # What requests announce, and what policies learn

    def queued(self, hint: PrefetchHint) -> None:
        """A request that will look up the entries of `hint` joined the end of the queue."""
        or_none("note a waiting request", self._prefetcher.queued, hint)

    def started(self, hint: PrefetchHint) -> None:
        """The request waits no longer: nothing more is fetched for it. Its entries stay protected
        until it has left.
        """
        or_none("note a started request", self._prefetcher.started, hint)
        if self._remote:
            or_none("look ahead", self._look_ahead, hint)

    def left(self, hint: PrefetchHint) -> None:
        """The request has opened its entries, or gave up. Twice is harmless."""
        or_none("note that a request left", self._prefetcher.left, hint)

    def served(self, turn: TurnSize) -> None:
        """Tell every tier's policy that a conversation's turn was served, before the turn's blocks
        are put.

        The blocks are entries whose `group` is the turn's and whose `index` counts them from 0.
        """
        for tier in self.tiers:
            or_none("tell a policy about a turn", tier.served, turn)

    def retarget(self, xi_blocks: int) -> None:
        """Tell the policies of all tiers their latency threshold, in blocks."""
        for tier in self.tiers:
            tier.tell(lambda policy: policy.retarget(xi_blocks))

    def place_by(self, placement: Placement) -> None:
        """From now on ask `placement` which entries, that a tier below has, are stored and copied
        up to memory.
        """
        self._copies.placement = placement

    # What it holds

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
    def read_only(self) -> bool:
        """Whether a tier is read-only."""
        return any(tier.read_only for tier in self.tiers)

    def speeds(self) -> dict[str, float]:
        """The recent speeds of the remote tiers in bytes a second, by kind, as far as they were
        measured.
        """
        found = {tier.kind.value: tier.speed() for tier in self._remote}
        return {kind: speed for kind, speed in found.items() if speed is not None}

    def away(self) -> tuple[str, ...]:
        """The kinds of the remote tiers that did not answer their last call in time."""
        return tuple(tier.kind.value for tier in self._remote if not tier.answers)

    def stats(self) -> StoreStats:
        """Counts and bytes of every tier and of the background threads."""
        tiers = tuple(tier.stats() for tier in self.tiers)
        copies = self._copies
        ahead = self._prefetcher
        return StoreStats(
            tiers, copies.pending_bytes, copies.dropped, ahead.fetched, ahead.requests
        )

    def flush(self) -> None:
        """Return when everything put so far is written or dropped, and what fits is fetched."""
        self._prefetcher.flush()
        self._copies.flush()

    def close(self) -> None:
        """Write what waits and close every tier. Twice is harmless; leases stay readable until they
        are closed.
        """
        atexit.unregister(self.close)
        self._prefetcher.close()
        self._copies.close()
        for tier in self.tiers:
            or_none("close a tier", tier.close)

    @property
    def _durable(self) -> tuple[Tier, ...]:
        """The tiers that outlive the process; memory if there is no other."""
        return self._below or self.tiers

    def _used_bytes(self) -> int:
        return sum(tier.stats().used_bytes or 0 for tier in self.tiers)

    def _put_in_memory(self, entry: EncodedEntry, *, needed: bool) -> None:
        """Put a new entry in memory if it belongs there, or if it is `needed` because no other tier
        takes it. A block of a conversation counts as used: its next turn reads it.
        """
        if self._memory is None:
            return
        used = bool(entry.info.group)
        if needed or self._copies.in_memory(entry.info, entry.size_bytes, used=used):
            or_none("store an entry", self._memory.put, entry)

    def _delete(self, key: EntryKey, tiers: Sequence[Tier]) -> bool:
        found = self._copies.discard(key)
        deleted = self._delete_from(tiers, key)
        if self._copies.discard(key):  # a copy up submitted a write between the two
            deleted |= self._delete_from(tiers, key)
        return found or deleted

    def _delete_from(self, tiers: Sequence[Tier], key: EntryKey) -> bool:
        with self._copies.deleting(key):
            deleted = [tier.delete(key) for tier in tiers]
        return any(deleted)

    def _look_ahead(self, hint: PrefetchHint) -> None:
        """Let the remote tiers look up what no local tier has, all at once."""
        keys = [entry.key for entry in hint.entries]
        near = {
            key
            for key in keys
            if self._copies.waiting(key) or any(tier.contains(key) for tier in self._local)
        }
        for tier in self._remote:
            tier.look_up_ahead([key for key in keys if key not in near])


def _refused(tier: Tier, keep: Callable[[Identity], bool]) -> list[EntryKey]:
    return [key for key, info in tier.scan() if info is None or not keep(info.identity)]


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
