"""The store: a stack of tiers, fastest first, behind one door.

Lookups fall down the stack and hits below climb up in the background; puts land in memory at once and sink to disk in
the background. It is told who waits (`queued`, `started`, `left`): policies spare what they will read, and it is
brought up before they start. None of its failures fails a request: what goes wrong is logged and is a miss (CacheBlend
section 5.1, "KV cache store").
"""

import atexit
import logging
import threading
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass
from typing import ParamSpec, TypeVar

import torch

from ragkv.closing import Closing
from ragkv.config import StoreConfig
from ragkv.errors import EntryDamagedError, StoreReadOnlyError

from .background import Background, Job
from .demand import Demand, Wanted
from .encoded import EncodedEntry
from .entry import Entry, EntryInfo, Identity
from .policies import PolicySettings, Turn, make_policy
from .prefetch import Prefetcher
from .reserve import Reserve
from .tiers import DiskTier, Lease, MemoryTier, ReadOnlyDiskTier, Tier, TierKind, TierStats
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


class Store(Closing):
    """Tiers, fastest first, and the background threads between them. All methods are thread-safe."""

    def __init__(
        self,
        tiers: Sequence[Tier],
        *,
        write_buffer_bytes: int,
        pin: bool = False,
        prefetch: bool = True,
        memory_reserve_bytes: int = 0,
    ) -> None:
        """A store over opened tiers, which it owns from now on. `pin` keeps entries in page-locked memory on CUDA.

        Where memory stands before slower tiers: `prefetch` brings up what waiting requests will read, and
        `memory_reserve_bytes` of it are kept free.
        """
        self._tiers = tuple(tiers)
        self._pin = pin
        self._background: Background[EncodedEntry] = Background(write_buffer_bytes, "ragkv-store")
        self._order = threading.Lock()  # a promotion and a deletion: never an entry brought back from the dead
        self._dropped_lock = threading.Lock()
        self._dropped_writes = 0
        stacked = len(self._tiers) > 1 and self._tiers[0].kind is TierKind.MEMORY
        reserve_bytes = memory_reserve_bytes if stacked else 0
        self._reserve = Reserve(self._tiers[0], reserve_bytes) if reserve_bytes else None
        self._line = Prefetcher(self._tiers, self._fetch if stacked and prefetch else None, reserve_bytes)
        atexit.register(self.close)

    @classmethod
    def open(cls, config: StoreConfig, *, pin: bool = False, block_tokens: int = 256) -> "Store":
        """The store that `config` describes: memory (unless 0 bytes), then disk (if a directory is given).

        A read-only store has a memory tier of its own: what it read once it may serve after the writer deleted it.
        Raises `StoreLockedError`, `StoreError` or `ConfigError`.
        """
        tiers: list[Tier] = []
        settings = PolicySettings(
            xi_blocks=config.xi_tokens // block_tokens,
            block_tokens=block_tokens,
            window_bytes=config.memory_bytes + (0 if config.directory is None else config.disk_bytes),
        )
        if config.memory_bytes:
            tiers.append(MemoryTier(config.memory_bytes, make_policy(config.policy, settings), pin))
        if config.directory is not None and config.read_only:
            tiers.append(ReadOnlyDiskTier(config.directory, config.direct_reads))
        elif config.directory is not None:
            policy = make_policy(config.policy, settings)
            tiers.append(DiskTier(config.directory, config.disk_bytes, policy, config.direct_reads))
        reserve = config.memory_bytes // 16 if config.memory_reserve_bytes is None else config.memory_reserve_bytes
        return cls(
            tiers,
            write_buffer_bytes=config.write_buffer_bytes,
            pin=pin,
            prefetch=config.prefetch,
            memory_reserve_bytes=reserve,
        )

    def lease(self, identity: Identity, token_ids: Sequence[int]) -> Lease | None:
        """Pin and open the entry of these tokens in the fastest tier that has it, or `None`.

        A hit below the fastest tier is copied up in the background once the lease is closed.
        """
        waiting = self._background.entry(identity.key(token_ids))  # first: if its write ends meanwhile, a tier has it
        for depth, tier in enumerate(self._tiers):
            lease = _or_none("look up an entry", tier.lease, identity, token_ids)
            if lease is not None:
                return lease if depth == 0 else _PromotingLease(lease, self._promote)
        if waiting is not None and waiting.info.proves(identity, token_ids):
            return MemoryLease(waiting, lambda _: None, lambda: None)
        return None

    def put(self, entry: Entry) -> None:
        """Keep `entry`: in memory at once, below it soon. Never waits for a disk; a full write buffer drops and counts.

        Nobody may write to the entry's tensors from now on.
        """
        encoded = EncodedEntry.of(entry).settled(self._pin)
        for tier in self._tiers:
            if tier.kind is TierKind.MEMORY:
                _or_none("keep an entry", tier.put, encoded)
                self._make_reserve()
            elif not tier.read_only and not self._write_behind(tier, encoded):
                self._count_drop()

    def put_durably(self, entry: Entry) -> bool:
        """Keep `entry` and return when it is in the slowest tier; whether it is.

        Raises `StoreReadOnlyError` if that tier is read-only.
        """
        encoded = EncodedEntry.of(entry).settled(self._pin)
        kept = False
        for tier in self._tiers:
            kept = bool(_or_none("keep an entry", tier.put, encoded))
        self._make_reserve()
        return kept

    def queued(self, demand: Demand) -> None:
        """A request that will look `demand` up waits from now on, behind all others told of."""
        _or_none("note who waits", self._line.queued, demand)

    def started(self, demand: Demand) -> None:
        """The request waits no longer: nothing is fetched for it any more. What it needs is spared until it `left`."""
        _or_none("note who starts", self._line.started, demand)

    def left(self, demand: Demand) -> None:
        """The request has opened what it needs, or gave up. Twice is harmless."""
        _or_none("note who left", self._line.left, demand)

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

        When this returns no tier has it, nor will a write or a copy that was under way bring it back. Raises
        `StoreReadOnlyError` if a tier is read-only.
        """
        found = self._background.discard(key)
        with self._order:
            gone = [tier.delete(key) for tier in self._tiers]
        return found or any(gone)

    def contains(self, key: str) -> bool:
        """Whether `key` is in a tier or waits to be written. Not a use."""
        return any(tier.contains(key) for tier in self._tiers) or self._background.entry(key) is not None

    def is_durable(self, key: str) -> bool:
        """Whether `key` is in the slowest tier, where `put_durably` would bring it. Not a use."""
        return bool(self._tiers) and self._tiers[-1].contains(key)

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
            return sum(tier.gc(keep) for tier in self._tiers)

    def stats(self) -> StoreStats:
        """Counts and bytes of every tier and of the way between them."""
        tiers = tuple(tier.stats() for tier in self._tiers)
        return StoreStats(tiers, self._background.pending_bytes, self._dropped_writes, self._line.fetched)

    def flush(self) -> None:
        """Return when everything put so far is written, or was dropped."""
        self._background.flush()

    def close(self) -> None:
        """Write what waits and close every tier. Twice is harmless; leases stay readable until they are closed."""
        atexit.unregister(self.close)
        self._line.close()
        self._background.close()
        if self._reserve is not None:
            self._reserve.close()
        for tier in self._tiers:
            _or_none("close a tier", tier.close)

    def _write_behind(self, tier: Tier, entry: EncodedEntry) -> bool:
        def write() -> None:
            if not tier.put(entry):
                self._count_drop()

        key = entry.info.key
        return tier.contains(key) or self._background.submit(Job(write, key, entry.size_bytes, entry))

    def _promote(self, lease: Lease) -> None:
        """Copy a leased entry to the fastest tier in the background; closes the lease."""

        info, fastest = lease.info, self._tiers[0]

        def copy() -> None:
            with lease:
                if fastest.contains(info.key):
                    return
                entry = lease.read_encoded(self._pin)
            with self._order:
                if any(tier.contains(info.key) for tier in self._tiers[1:]):  # not deleted meanwhile
                    fastest.put(entry)
            self._make_reserve()

        fits = lease.stored_bytes <= fastest.stats().capacity_bytes
        if not fits or not self._background.submit(Job(copy, info.key, lease.stored_bytes, cancel=lease.close)):
            lease.close()

    def _fetch(self, wanted: Wanted, spared: Set[str], check: Callable[[], None]) -> bool:
        """Copy an entry up ahead of its use, evicting nothing of `spared`; whether any tier has it."""
        entry = self._background.entry(wanted.key)  # waits to be written: memory has dropped it already
        if entry is None:
            leases = (tier.lease(wanted.identity, wanted.token_ids) for tier in self._tiers[1:])
            lease = next((lease for lease in leases if lease is not None), None)
            if lease is None:
                return False
            with lease:
                entry = lease.read_encoded(self._pin, check)
        with self._order:
            check()
            waits = self._background.entry(wanted.key) is not None
            if waits or any(tier.contains(wanted.key) for tier in self._tiers[1:]):  # not deleted meanwhile
                self._tiers[0].put_sparing(entry, spared)
        self._make_reserve()
        return True

    def _make_reserve(self) -> None:
        if self._reserve is not None:
            self._reserve.used()

    def _count_drop(self) -> None:
        with self._dropped_lock:
            self._dropped_writes += 1


class _PromotingLease(Lease):
    """A lease from a slower tier that hands itself on to be copied up when its reader is done."""

    def __init__(self, lease: Lease, promote: Callable[[Lease], None]) -> None:
        self.info, self.kind, self.sensitivity = lease.info, lease.kind, lease.sensitivity
        self._lease = lease
        self.in_place = lease.in_place
        self._damaged = False
        self._promote: Callable[[Lease], None] | None = promote

    def read_layer(self, layer: int, out: torch.Tensor | None = None) -> torch.Tensor:
        try:
            return self._lease.read_layer(layer, out)
        except EntryDamagedError:
            self._damaged = True
            raise

    @property
    def stored_bytes(self) -> int:
        return self._lease.stored_bytes

    def read_encoded(self, pin: bool = False, between: Callable[[], None] = lambda: None) -> EncodedEntry:
        return self._lease.read_encoded(pin, between)

    def close(self) -> None:
        promote, self._promote = self._promote, None
        if promote is not None:
            if self._damaged:
                self._lease.close()
            else:
                promote(self._lease)


def _or_none(what: str, action: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | None:
    """The action's result, or `None` where it failed. A refused write to a read-only store is the caller's to know."""
    try:
        return action(*args, **kwargs)
    except StoreReadOnlyError:
        raise
    except Exception:  # a store failure never fails a request
        log.exception("The store could not %s; going on without.", what)
        return None
