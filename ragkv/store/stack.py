"""A stack of tiers, fastest first: how an entry is found, read, stored and copied between them.

A lookup asks the tiers in order. A hit in a slower tier is promoted to the faster ones in the
background. A put stores in memory at once; the disk and shared storage are written in the
background. A `Placement` may keep entries out of memory. The scheduler announces waiting requests
(`queued`, `started`, `left`): policies protect their entries, and the prefetcher promotes them
before requests start. A caller waits for a remote tier only if it reads from it. A store failure
never fails a request: it is logged and counts as a miss (CacheBlend section 5.1, "KV cache store").
"""

import atexit
import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, ParamSpec, TypeVar, cast

from ragkv.errors import StoreReadOnlyError
from ragkv.runtime import Closing

from .copying import Placement, Prefetcher, Promoter, PromotingLease, Writers
from .entry import EncodedEntry, Entry, EntryKey, Identity, PrefetchHint
from .policies import TurnSize
from .tiers import Lease, MemoryLease, Tier, TierKind

if TYPE_CHECKING:
    from ragkv.cluster import RemoteTier

log = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")


class TierStack(Closing):
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
        """A stack that owns `tiers`, opened. `page_locked`: entries in memory are page-locked where
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
            lease = or_none("look up an entry", self._tiers[0].lease, identity, token_ids)
            if lease is not None:
                return lease
            below = self._tiers[1:]
        key = identity.key(token_ids)
        promotion = self._promoter.register(key)
        # before the lookup: if its write ends meanwhile, a tier has it
        waiting = self._writers.entry(key)
        for depth, tier in enumerate(below, len(self._tiers) - len(below)):
            lease = or_none("look up an entry", tier.lease, identity, token_ids)
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

    def contains(self, key: EntryKey) -> bool:
        """Whether `key` is in a tier or waits to be written. Does not count as a use."""
        return self._writers.entry(key) is not None or any(
            tier.contains(key) for tier in self._tiers
        )

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
        for tier in self._tiers:
            or_none("tell a policy about a turn", tier.served, turn)

    def retarget(self, xi_blocks: int) -> None:
        """Tell the policies of all tiers their latency threshold, in blocks."""
        for tier in self._tiers:
            tier.tell(lambda policy: policy.retarget(xi_blocks))

    def speeds(self) -> dict[str, float]:
        """The recent speeds of the remote tiers in bytes a second, by kind, as far as they were
        measured.
        """
        found = {tier.kind.value: tier.speed() for tier in self._remote}
        return {kind: speed for kind, speed in found.items() if speed is not None}

    def away(self) -> tuple[str, ...]:
        """The kinds of the remote tiers that did not answer their last call in time."""
        return tuple(tier.kind.value for tier in self._remote if not tier.answers)

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
            or_none("close a tier", tier.close)

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
                or_none("store an entry", tier.put, entry)

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
