"""The store: a stack of tiers, fastest first, behind one door.

Lookups fall down the stack and hits below climb up in the background; puts land in memory at once and sink to disk, and
to storage that is shared, in the background. It is told who waits (`queued`, `started`, `left`): policies spare what
they will read, and it is brought up before they start. No caller waits for a tier far away but one that reads from it,
deletes, or asks to write durably. None of its failures fails a request: what goes wrong is logged and is a miss
(CacheBlend section 5.1, "KV cache store").
"""

import atexit
import functools
import logging
import threading
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass
from typing import ParamSpec, TypeVar

from ragkv.config import StoreConfig
from ragkv.errors import StoreReadOnlyError
from ragkv.runtime import Closing

from .background import Background, Job
from .climbing import Climb, ClimbingLease, Climbs
from .encoded import EncodedEntry
from .entry import Entry, EntryInfo, Identity
from .policies import PolicySettings, Turn, make_policy
from .prefetch import Prefetcher
from .prefetch_hint import HintedEntry, PrefetchHint
from .reserve import Reserve
from .tiers import DiskTier, Lease, MemoryTier, ReadOnlyDiskTier, Speed, Tier, TierKind, TierStats
from .tiers.memory import MemoryLease

log = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class StoreStats:
    """What the store holds and did since it was opened."""

    tiers: tuple[TierStats, ...]  # fastest first
    pending_bytes: int  # waiting to be written, or to be copied to a faster tier
    dropped_writes: int  # entries that never reached the tiers below: the write buffer was full, or the write failed
    prefetched: int = 0  # entries brought to the fastest tier for requests that waited


@dataclass(frozen=True, slots=True)
class Claim:
    """This replica does something; where it is the only one, the tier that says so."""

    name: str
    token: str = ""
    tier: Tier | None = None


class Store(Closing):
    """Tiers, fastest first, and the background threads between them. All methods are thread-safe."""

    def __init__(
        self,
        tiers: Sequence[Tier],
        *,
        write_buffer_bytes: int,
        page_locked: bool = False,
        prefetch: bool = True,
        memory_reserve_bytes: int = 0,
    ) -> None:
        """A store that owns `tiers`, opened. `page_locked`: entries in memory are page-locked where CUDA is there.

        Where memory stands before slower tiers: `prefetch` brings up what waiting requests will read, and
        `memory_reserve_bytes` of it are kept free.
        """
        self._tiers = tuple(tiers)
        self._page_locked = page_locked
        self._background: Background[EncodedEntry] = Background(write_buffer_bytes, "ragkv-store")
        self._writers = {  # a tier far away has its own: nothing else waits while it does not answer
            tier: Background[EncodedEntry](write_buffer_bytes, f"ragkv-to-{tier.kind.value}")
            for tier in self._tiers
            if tier.is_remote
        }
        self._climbs = Climbs()
        self._order = threading.Lock()  # a promotion and a deletion: never an entry brought back from the dead
        self._dropped_lock = threading.Lock()
        self._dropped_writes = 0
        stacked = len(self._tiers) > 1 and self._tiers[0].kind is TierKind.MEMORY
        reserve_bytes = memory_reserve_bytes if stacked else 0
        self._reserve = Reserve(self._tiers[0], reserve_bytes) if reserve_bytes else None
        self._prefetcher = Prefetcher(self._tiers, self._fetch if stacked and prefetch else None, reserve_bytes)
        atexit.register(self.close)

    @property
    def _durable(self) -> tuple[Tier, ...]:
        """The tiers that outlive the process; memory where there is no other."""
        return tuple(tier for tier in self._tiers if tier.kind is not TierKind.MEMORY) or self._tiers

    @classmethod
    def open(cls, config: StoreConfig, *, page_locked: bool = False, block_tokens: int = 256) -> "Store":
        """The store that `config` describes: memory (unless 0 bytes), disk (if a directory is given), Redis, S3.

        A read-only store has a memory tier of its own: what it read once it may serve after the writer deleted it.
        Raises `StoreLockedError`, `StoreError`, `ConfigError` or `MissingExtraError`; whether shared storage answers
        is not asked here.
        """
        tiers: list[Tier] = []
        settings = PolicySettings(
            xi_blocks=config.xi_tokens // block_tokens,
            block_tokens=block_tokens,
            window_bytes=config.memory_bytes + (0 if config.directory is None else config.disk_bytes),
        )
        if config.memory_bytes:
            tiers.append(MemoryTier(config.memory_bytes, make_policy(config.policy, settings), page_locked))
        if config.directory is not None and config.read_only:
            tiers.append(ReadOnlyDiskTier(config.directory, config.direct_reads))
        elif config.directory is not None:
            policy = make_policy(config.policy, settings)
            tiers.append(DiskTier(config.directory, config.disk_bytes, policy, config.direct_reads))
        if config.redis is not None or config.s3 is not None:
            from .remote import open_remote

            tiers.extend(open_remote(config))
        reserve = config.memory_bytes // 16 if config.memory_reserve_bytes is None else config.memory_reserve_bytes
        return cls(
            tiers,
            write_buffer_bytes=config.write_buffer_bytes,
            page_locked=page_locked,
            prefetch=config.prefetch,
            memory_reserve_bytes=reserve,
        )

    def lease(self, identity: Identity, token_ids: Sequence[int]) -> Lease | None:
        """Pin and open the entry of these tokens in the fastest tier that has it, or `None`.

        A hit below the fastest tier is copied up in the background once the lease is closed.
        """
        waiting = self._waiting(identity.key(token_ids))  # first: if its write ends meanwhile, a tier has it
        for depth, tier in enumerate(self._tiers):
            lease = _or_none("look up an entry", tier.lease, identity, token_ids)
            if lease is not None:
                return lease if depth == 0 else self._climbing(lease, depth)
        if waiting is not None and waiting.info.matches(identity, token_ids):
            return MemoryLease(waiting, lambda _: None, lambda: None)
        return None

    def put(self, entry: Entry) -> None:
        """Keep `entry`: in memory at once, below it soon. Never waits for a disk; a full write buffer drops and counts.

        Nobody may write to the entry's tensors from now on.
        """
        encoded = EncodedEntry.of(entry).compact(self._page_locked)
        for tier in self._tiers:
            if tier.kind is TierKind.MEMORY:
                _or_none("keep an entry", tier.put, encoded)
                self._make_reserve()
            elif not tier.read_only and not self._write_behind(tier, encoded):
                self._count_drop()

    def put_durably(self, entry: Entry) -> bool:
        """Keep `entry` and return when every tier has it, as far as they answer; whether one below memory has.

        Raises `StoreReadOnlyError` if a tier is read-only.
        """
        encoded = EncodedEntry.of(entry).compact(self._page_locked)
        kept = {tier: bool(_or_none("keep an entry", tier.put, encoded)) for tier in self._tiers}
        self._make_reserve()
        return any(kept[tier] for tier in self._durable)

    def ensure_durable(self, identity: Identity, token_ids: Sequence[int]) -> bool:
        """Whether a tier below memory has the entry; if one has, it is copied to those that lack it."""
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
                _or_none("keep an entry", tier.put, entry)
        return True

    def claim(self, name: str, expires_s: float) -> Claim | None:
        """Be the one replica that does `name`, for that long at most; `None` if another is.

        Where no tier can tell, or it does not answer, everybody is the one.
        """
        tier = next((tier for tier in self._writers if tier.arbitrates), None)
        token = "" if tier is None else tier.claim(name, expires_s)
        return None if token is None else Claim(name, token, tier)

    def release(self, claim: Claim, then: Callable[[], None] = lambda: None) -> None:
        """End a claim once what was put before is written, and call `then`. Returns at once."""
        tier = claim.tier
        if tier is None:
            return

        def end() -> None:
            tier.release(claim.name, claim.token)
            then()

        self._writers[tier].submit(Job(end))

    def queued(self, hint: PrefetchHint) -> None:
        """A request that will look `hint` up waits from now on, behind all others told of."""
        _or_none("note who waits", self._prefetcher.queued, hint)

    def started(self, hint: PrefetchHint) -> None:
        """The request waits no longer: nothing is fetched for it any more. What it needs is spared until it `left`."""
        _or_none("note who starts", self._prefetcher.started, hint)
        if self._writers:
            _or_none("look ahead", self._look_ahead, hint)

    def left(self, hint: PrefetchHint) -> None:
        """The request has opened what it needs, or gave up. Twice is harmless."""
        _or_none("note who left", self._prefetcher.left, hint)

    def served(self, turn: Turn) -> None:
        """Tell every tier's policy that a conversation's turn was served, before its blocks are put.

        The blocks are entries whose `group` is the turn's and whose `index` counts them from 0.
        """
        for tier in self._tiers:
            _or_none("tell a policy of a turn", tier.served, turn)

    def delete(self, identity: Identity, token_ids: Sequence[int]) -> bool:
        """Drop the entry of these tokens from every tier; see `delete_key`."""
        return self.delete_key(identity.key(token_ids))

    def delete_key(self, key: str) -> bool:
        """Drop `key` from every tier and from what waits to be written; whether it was anywhere.

        When this returns no tier here has it, nor will a write or a copy that was under way bring it back; one far
        away that does not answer drops it when it does, and serves it no more. Raises `StoreReadOnlyError` if a tier is
        read-only.
        """
        found = self._discard(key)
        with self._order:
            gone = [tier.delete(key) for tier in self._tiers]
            self._climbs.stop(key)
        if self._discard(key):  # a copy was handed to a writer between the two
            with self._order:
                gone += [tier.delete(key) for tier in self._tiers]
        return found or any(gone)

    def contains(self, key: str) -> bool:
        """Whether `key` is in a tier or waits to be written. Not a use."""
        return self._waiting(key) is not None or any(tier.contains(key) for tier in self._tiers)

    def is_durable(self, key: str) -> bool:
        """Whether a tier below memory has `key`. Not a use."""
        return any(tier.contains(key) for tier in self._durable)

    def infos(self) -> Iterator[EntryInfo]:
        """What the tiers hold, each key once, in no particular order. Not a use."""
        seen: set[str] = set()
        for tier in self._tiers:
            for info in tier.infos():
                if info.key not in seen:
                    seen.add(info.key)
                    yield info

    def gc(self, keep: Callable[[Identity], bool]) -> int:
        """Drop every entry whose identity `keep` refuses, in every tier; the bytes freed, over all tiers."""
        self.flush()
        with self._order:
            self._climbs.stop()
            return sum(tier.gc(keep) for tier in self._tiers)

    def speeds(self) -> dict[str, Speed]:
        """Of the tiers far away, by kind: how fast they were lately, as far as that was measured."""
        found = {tier.kind.value: tier.speed() for tier in self._writers}
        return {kind: speed for kind, speed in found.items() if speed is not None}

    def stats(self) -> StoreStats:
        """Counts and bytes of every tier and of the way between them."""
        tiers = tuple(tier.stats() for tier in self._tiers)
        pending_bytes = sum(background.pending_bytes for background in self._backgrounds())
        return StoreStats(tiers, pending_bytes, self._dropped_writes, self._prefetcher.fetched)

    def flush(self) -> None:
        """Return when everything put so far is written, or was dropped."""
        for background in self._backgrounds():
            background.flush()

    def close(self) -> None:
        """Write what waits and close every tier. Twice is harmless; leases stay readable until they are closed."""
        atexit.unregister(self.close)
        self._prefetcher.close()
        for background in self._backgrounds():
            background.close()
        if self._reserve is not None:
            self._reserve.close()
        for tier in self._tiers:
            _or_none("close a tier", tier.close)

    def _backgrounds(self) -> Iterator[Background[EncodedEntry]]:
        """The farthest first: copies that come from there give the nearer ones work."""
        yield from reversed(self._writers.values())
        yield self._background

    def _waiting(self, key: str) -> EncodedEntry | None:
        found = (background.entry(key) for background in self._backgrounds())
        return next((entry for entry in found if entry is not None), None)

    def _discard(self, key: str) -> bool:
        found = [background.discard(key) for background in self._backgrounds()]  # of all, not of the first that has it
        return any(found)

    def _look_ahead(self, hint: PrefetchHint) -> None:
        """Let the tiers far away look for what is not near, the second for what the first has not."""
        near = [tier for tier in self._tiers if not tier.is_remote]
        keys = [wanted.key for wanted in hint.entries]
        look: Callable[[Sequence[str]], None] = _nothing
        for tier in reversed(self._writers):
            look = functools.partial(tier.look_up_ahead, on_missing=look)
        look([key for key in keys if self._waiting(key) is None and not any(tier.contains(key) for tier in near)])

    def _write_behind(self, tier: Tier, entry: EncodedEntry) -> bool:
        def write() -> None:
            if not tier.put(entry):
                self._count_drop()

        key, writer = entry.info.key, self._writers.get(tier, self._background)
        there = not tier.is_remote and tier.contains(key)  # far away, `put` itself finds out
        return there or writer.submit(Job(write, key, entry.size_bytes, entry))

    def _climbing(self, lease: Lease, depth: int) -> Lease:
        return ClimbingLease(lease, self._climbs.begin(lease.info.key, depth), self._promote)

    def _promote(self, lease: Lease, climb: Climb) -> None:
        """Copy a leased entry to the tiers above its own in the background; closes the lease."""

        info, fastest = lease.info, self._tiers[0]

        def copy() -> None:
            with lease:
                if fastest.contains(info.key):
                    return
                entry = lease.read_encoded(self._page_locked)
            self._put_up(entry, climb, fastest.put)

        fits = lease.stored_bytes <= fastest.stats().capacity_bytes
        worker = self._writers.get(self._tiers[climb.depth], self._background)
        if not fits or not worker.submit(Job(copy, info.key, lease.stored_bytes, cancel=lease.close)):
            lease.close()

    def _fetch(self, wanted: HintedEntry, spared: Set[str], check: Callable[[], None]) -> bool:
        """Copy an entry up ahead of its use, evicting nothing of `spared`; whether any tier has it."""
        climb = self._climbs.begin(wanted.key, 1)
        entry = self._waiting(wanted.key)  # waits to be written: memory has dropped it already
        if entry is None:
            leases = ((depth, tier.lease(wanted.identity, wanted.token_ids)) for depth, tier in self._below)
            climb.depth, lease = next(((depth, lease) for depth, lease in leases if lease is not None), (1, None))
            if lease is None:
                return False
            with lease:
                lease.prefetch()
                entry = lease.read_encoded(self._page_locked, check)
        check()
        self._put_up(entry, climb, lambda entry: self._tiers[0].put(entry, spared))
        return True

    @property
    def _below(self) -> Iterator[tuple[int, Tier]]:
        return ((depth, tier) for depth, tier in enumerate(self._tiers) if depth)

    def _put_up(self, entry: EncodedEntry, climb: Climb, put: Callable[[EncodedEntry], object]) -> None:
        """Keep what was read from below in the fastest tier, by `put`, and soon in those between."""
        with self._order:
            if not climb.going:  # deleted meanwhile
                return
            put(entry)
            for tier in self._tiers[1 : climb.depth]:
                if not tier.read_only:
                    self._write_behind(tier, entry)
        self._make_reserve()

    def _make_reserve(self) -> None:
        if self._reserve is not None:
            self._reserve.used()

    def _count_drop(self) -> None:
        with self._dropped_lock:
            self._dropped_writes += 1


def _nothing(_keys: Sequence[str]) -> None:
    """No further tier looks for what the last one missed."""


def _or_none(what: str, action: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | None:
    """The action's result, or `None` where it failed. A refused write to a read-only store is the caller's to know."""
    try:
        return action(*args, **kwargs)
    except StoreReadOnlyError:
        raise
    except Exception:  # a store failure never fails a request
        log.exception("The store could not %s; going on without.", what)
        return None
