"""The store: tiers, fastest first.

A lookup asks the tiers in order. A hit in a slower tier is copied to the faster ones in the
background (`copying.py`). A put stores in memory at once; the disk and shared storage are written
in the background. Only a read waits for a remote tier, at most for the tier's timeout. Then the
whole pass waits, with all prompts in it.

A tier that fails never fails a request. The failure is logged and counts as a cache miss
(CacheBlend section 5.1, "KV cache store").

Three objects of a store hold what no question needs: `durable` writes, its `contents` and its
`limits`. Its `prefetcher` is told which requests wait.
"""

import weakref
from collections.abc import Sequence
from functools import partial

from ragkv.runtime import Closing, close_dropped

from .contents import Contents, deleted_everywhere
from .copying import TierCopies, or_none
from .durable import DurableTiers
from .entry import Entry, EntryKey, Identity, StoredEntry
from .limits import StoreLimits
from .policies import TurnSize
from .prefetch import Prefetcher
from .tiers import Lease, MemoryLease, StoreStats, Tier


class Store(Closing):
    """The stack of tiers that an engine owns. All methods are thread-safe."""

    def __init__(
        self,
        tiers: Sequence[Tier],
        *,
        write_buffer_bytes: int,
        prefetch: bool = True,
    ) -> None:
        """A store that owns `tiers`, opened, each of another kind, fastest first.

        If the first of several tiers is memory, `prefetch` copies the entries of waiting requests
        up.
        """
        self.tiers = tuple(tiers)
        copies = self._copies = TierCopies(self.tiers, write_buffer_bytes)
        copies_up = copies.memory is not None and bool(copies.below) and prefetch
        self.prefetcher = Prefetcher(self.tiers, copies, copies_up)
        self.durable = DurableTiers(copies.below or self.tiers, copies)
        self.contents = Contents(self.tiers, copies)
        self.limits = StoreLimits(self.tiers, copies)
        # At the end of the process the newest is closed first: an engine before its store, in which
        # it still saves.
        self._close_parts = partial(_close, self.prefetcher, copies, self.tiers)
        self._unclosed = weakref.finalize(self, close_dropped, "A store", self._close_parts)

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
                    lease.on_close(partial(self._copies.promote, depth=depth, since=since))
                return lease
        if waiting is not None and waiting.info.matches(identity, token_ids):
            return MemoryLease(waiting)
        return None

    def contains(self, key: EntryKey, *, here: bool = False) -> bool:
        """Whether `key` is in a tier, or on this machine if only `here`, or waits to be written.
        Does not count as a use. A remote tier is asked over the network.
        """
        return self._copies.waiting(key) is not None or any(
            tier.contains(key) for tier in self.tiers if not (here and tier.is_remote)
        )

    def put(self, entry: Entry | StoredEntry, wait_s: float = 0.0) -> None:
        """Store `entry`: in memory at once, soon in the tiers below that are not read-only. Waits
        for a disk or a server `wait_s` at most.

        A write buffer that stays full drops the write and counts it. The caller must not write to
        the entry's tensors afterwards.
        """
        copies = self._copies
        to_store = copies.stored_form(entry)
        written = [copies.write(tier, to_store, wait_s) for tier in copies.written]
        copies.put_in_memory(to_store, needed=not any(written))

    def stored_form(self, entry: Entry | StoredEntry) -> StoredEntry:
        """The entry in the form in which it is stored: `put` takes less time with it."""
        return self._copies.stored_form(entry)

    def turn_prefilled(self, turn: TurnSize) -> None:
        """Tell every tier's policy that a turn's prompt is computed, before its blocks are put. The
        turn may still be given up.

        The blocks are entries whose `group` is the turn's and whose `index` counts them from 0.
        """
        for tier in self.tiers:
            if tier.ledger is not None:
                or_none(
                    "notify a policy",
                    tier.ledger.notify_policy,
                    lambda policy: policy.turn_prefilled(turn),
                )

    def delete(self, key: EntryKey, *, here: bool = False) -> bool:
        """Drop `key` from every tier and from the write buffer; whether it was anywhere.

        After this returns, no tier of this process has it, and no running write or copy brings it
        back. A remote tier that does not answer serves it no more, and deletes it as soon as it
        answers. If only `here`, on this machine, no remote tier is asked. Raises
        `StoreReadOnlyError` if a tier is read-only.
        """
        tiers = [tier for tier in self.tiers if not (here and tier.is_remote)]
        with self._copies.deleting(key):  # from here on no copy up submits a write
            found = self._copies.cancel(key)
            deleted = deleted_everywhere(tiers, lambda tier: tier.delete(key))
        return found or deleted > 0

    def away(self) -> tuple[str, ...]:
        """The kinds of the remote tiers that did not answer their last call in time."""
        return tuple(tier.kind for tier in self.tiers if tier.is_remote and not tier.answers)

    def speeds(self) -> dict[str, float]:
        """The recent speeds of the remote tiers in bytes a second, by kind, as far as they were
        measured.
        """
        found = {tier.kind: tier.speed() for tier in self.tiers}
        return {kind: speed for kind, speed in found.items() if speed is not None}

    def stats(self) -> StoreStats:
        """Counts and bytes of every tier and of the background threads."""
        copies = self._copies
        ahead = self.prefetcher
        tiers = tuple(tier.stats() for tier in self.tiers)
        return StoreStats(
            tiers, copies.pending_bytes, copies.dropped, ahead.fetched, ahead.requests
        )

    def flush(self) -> None:
        """Return when everything put so far is written or dropped, and what fits is fetched."""
        self.prefetcher.flush()
        self._copies.flush()

    def close(self) -> None:
        """Write what waits and close every tier. Leases stay readable until they are closed."""
        self._unclosed.detach()
        self._close_parts()


def _close(prefetcher: Prefetcher, copies: TierCopies, tiers: Sequence[Tier]) -> None:
    """Write what waits, and close every tier."""
    prefetcher.close()
    copies.close()
    for tier in tiers:
        or_none("close a tier", tier.close)
