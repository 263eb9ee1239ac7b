"""The store: a stack of tiers, fastest first, with one interface.

A lookup asks the tiers in order. A hit in a slower tier is promoted to the faster ones in the
background. A put stores in memory at once; the disk and shared storage are written in the
background. A `Placement` may keep entries out of memory. The scheduler announces waiting requests
(`queued`, `started`, `left`): policies protect their entries, and the prefetcher promotes them
before requests start. A caller waits for a remote tier only if it reads from it, deletes, or writes
durably. A store failure never fails a request: it is logged and counts as a miss (CacheBlend
section 5.1, "KV cache store").
"""

import atexit
import itertools
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING, ParamSpec, TypeVar, cast

from ragkv.config import StoreConfig
from ragkv.errors import StoreReadOnlyError
from ragkv.runtime import Closing

from .entry import EncodedEntry, Entry, EntryInfo, Identity
from .key import EntryKey
from .policies import PolicySettings, TurnSize, make_policy
from .prefetch import Prefetcher, PrefetchHint
from .promotion import Placement, Promoter, PromotingLease, Writers
from .tiers import (
    DiskTier,
    Lease,
    MemoryLease,
    MemoryTier,
    ReadOnlyDiskTier,
    Tier,
    TierKind,
    TierStats,
)

if TYPE_CHECKING:
    from .remote import RemoteTier

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


class Store(Closing):
    """Tiers, fastest first, and the background threads between them. All methods are
    thread-safe.
    """

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
        self._tiers = tuple(tiers)
        self._page_locked = page_locked
        has_memory_above = len(self._tiers) > 1 and self._tiers[0].kind is TierKind.MEMORY
        self._writers = Writers(self._tiers, write_buffer_bytes)
        self._promoter = Promoter(self._tiers, self._writers)
        self._prefetcher = Prefetcher(
            self._tiers, self._promoter.fetch if has_memory_above and prefetch else None
        )
        atexit.register(self.close)

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
            from .remote import open_remote

            tiers.extend(open_remote(config))
        buffer_bytes = config.write_buffer_bytes
        return cls(
            tiers,
            write_buffer_bytes=buffer_bytes,
            page_locked=page_locked,
            prefetch=config.prefetch,
        )

    @property
    def read_only(self) -> bool:
        """Whether a tier is read-only."""
        return any(tier.read_only for tier in self._tiers)

    def place_by(self, placement: Placement) -> None:
        """From now on ask `placement` which entries, that a tier below has, are stored and copied
        up to memory.
        """
        self._promoter.placement = placement

    def lease(self, identity: Identity, token_ids: Sequence[int]) -> Lease | None:
        """Pin and open the entry of these tokens in the fastest tier that has it, or `None`.

        A hit below the fastest tier is promoted in the background after the lease is closed.
        """
        below = self._tiers
        if self._tiers and self._tiers[0].kind is TierKind.MEMORY:
            lease = _or_none("look up an entry", self._tiers[0].lease, identity, token_ids)
            if lease is not None:
                return lease
            below = self._tiers[1:]
        key = identity.key(token_ids)
        promotion = self._promoter.register(key)
        # before the lookup: if its write ends meanwhile, a tier has it
        waiting = self._writers.entry(key)
        for depth, tier in enumerate(below, len(self._tiers) - len(below)):
            lease = _or_none("look up an entry", tier.lease, identity, token_ids)
            if lease is not None:
                promotion.depth = depth
                return PromotingLease(lease, promotion, self._promoter.promote) if depth else lease
        if waiting is not None and waiting.info.matches(identity, token_ids):
            return MemoryLease(waiting)
        return None

    def put(self, entry: Entry, wait_s: float = 0.0) -> None:
        """Store `entry`: in memory at once, in the tiers below soon. Waits for a disk or a server
        `wait_s` at most.

        A write buffer that stays full drops the write and counts it. The caller must not write to
        the entry's tensors afterwards.
        """
        encoded = EncodedEntry.of(entry).compact(self._page_locked)
        below = [
            tier for tier in self._tiers if tier.kind is not TierKind.MEMORY and not tier.read_only
        ]
        written = [self._writers.write(tier, encoded, wait_s) for tier in below]
        if not any(written) or self._in_memory(encoded):
            self._put_in_memory(encoded)

    def put_durably(self, entry: Entry) -> bool:
        """Store `entry` in every tier that answers, then return whether a tier below memory has it.

        Raises `StoreReadOnlyError` if a tier is read-only.
        """
        encoded = EncodedEntry.of(entry).compact(self._page_locked)
        stored = [_or_none("store an entry", tier.put, encoded) for tier in self._durable]
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
            entry = _or_none("read an entry", lease.read_encoded)
        if entry is None:
            return False
        for tier in lacking:
            if not tier.read_only:
                _or_none("store an entry", tier.put, entry)
        return True

    def queued(self, hint: PrefetchHint) -> None:
        """A request that will look up the entries of `hint` joined the end of the queue."""
        _or_none("note a waiting request", self._prefetcher.queued, hint)

    def started(self, hint: PrefetchHint) -> None:
        """The request waits no longer: nothing more is fetched for it. Its entries stay protected
        until it has left.
        """
        _or_none("note a started request", self._prefetcher.started, hint)
        if self._remote:
            _or_none("look ahead", self._look_ahead, hint)

    def left(self, hint: PrefetchHint) -> None:
        """The request has opened its entries, or gave up. Twice is harmless."""
        _or_none("note that a request left", self._prefetcher.left, hint)

    def served(self, turn: TurnSize) -> None:
        """Tell every tier's policy that a conversation's turn was served, before the turn's blocks
        are put.

        The blocks are entries whose `group` is the turn's and whose `index` counts them from 0.
        """
        for tier in self._tiers:
            _or_none("tell a policy about a turn", tier.served, turn)

    def retarget(self, xi_blocks: int) -> None:
        """Tell the policies of all tiers their latency threshold, in blocks."""
        for tier in self._tiers:
            tier.tell(lambda policy: policy.retarget(xi_blocks))

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

    def contains(self, key: EntryKey) -> bool:
        """Whether `key` is in a tier or waits to be written. Does not count as a use."""
        return self._writers.entry(key) is not None or any(
            tier.contains(key) for tier in self._tiers
        )

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
        tiers = tuple(tier.stats() for tier in self._tiers)
        return StoreStats(
            tiers, self._writers.pending_bytes, self._writers.dropped, self._prefetcher.fetched
        )

    def flush(self) -> None:
        """Return when everything put so far is written or dropped."""
        self._writers.flush()

    def close(self) -> None:
        """Write what waits and close every tier. Twice is harmless; leases stay readable until they
        are closed.
        """
        atexit.unregister(self.close)
        self._prefetcher.close()
        self._writers.close()
        for tier in self._tiers:
            _or_none("close a tier", tier.close)

    @property
    def _durable(self) -> tuple[Tier, ...]:
        """The tiers that outlive the process; memory if there is no other."""
        return (
            tuple(tier for tier in self._tiers if tier.kind is not TierKind.MEMORY) or self._tiers
        )

    @property
    def _remote(self) -> "tuple[RemoteTier, ...]":
        return tuple(cast("RemoteTier", tier) for tier in self._tiers if tier.is_remote)

    @property
    def _local(self) -> tuple[Tier, ...]:
        return tuple(tier for tier in self._tiers if not tier.is_remote)

    def _in_memory(self, entry: EncodedEntry) -> bool:
        """Whether a new entry belongs in memory; a block of a conversation counts as used: its next
        turn reads it.
        """
        return self._promoter.in_memory(entry.info, entry.size_bytes, used=bool(entry.info.group))

    def _put_in_memory(self, entry: EncodedEntry) -> None:
        for tier in self._tiers:
            if tier.kind is TierKind.MEMORY:
                _or_none("store an entry", tier.put, entry)

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

    def _look_ahead(self, hint: PrefetchHint) -> None:
        """Let the remote tiers look up what no local tier has, all at once."""
        keys = [entry.key for entry in hint.entries]
        near = {
            key
            for key in keys
            if self._writers.entry(key) or any(tier.contains(key) for tier in self._local)
        }
        for tier in self._remote:
            tier.look_up_ahead([key for key in keys if key not in near])


def _or_none(what: str, action: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | None:
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
