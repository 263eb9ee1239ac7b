"""The store: tiers, fastest first. What a question needs of it; the rest is in `announcements.py`
and `upkeep.py`.

A lookup asks the tiers in order. A hit in a slower tier is copied to the faster ones in the
background (`copying.py`). A put stores in memory at once; the disk and shared storage are written in
the background. A caller waits for a remote tier only if it reads from it.
A store failure never fails a request: it is logged and counts as a miss (CacheBlend section 5.1, "KV
cache store").
"""

import weakref
from collections.abc import Sequence
from functools import partial

from ragkv.config import StoreConfig

from .announcements import Announcements
from .copying import TierCopies, or_none
from .entry import EncodedEntry, Entry, EntryKey, Identity
from .opening import open_tiers
from .policies import TurnSize
from .prefetch import Prefetcher
from .tiers import Lease, MemoryLease, Tier, TierKind


class Store(Announcements):
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
        self._below = self.tiers[1:] if has_memory else self.tiers
        self._local = tuple(tier for tier in self.tiers if not tier.is_remote)
        self._remote = tuple(tier for tier in self.tiers if tier.is_remote)
        self._page_locked = page_locked
        self._copies = TierCopies(self.tiers, write_buffer_bytes)
        copies_up = has_memory and bool(self._below) and prefetch
        self._prefetcher = Prefetcher(self.tiers, self._copies.fetch if copies_up else None)
        # At the end of the process the newest is closed first: an engine before its store, in which
        # it still saves.
        self._at_exit = weakref.finalize(self, self.close)

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
        self._copies.put_in_memory(encoded, needed=not any(written))

    def served(self, turn: TurnSize) -> None:
        """Tell every tier's policy that a conversation's turn was served, before the turn's blocks
        are put.

        The blocks are entries whose `group` is the turn's and whose `index` counts them from 0.
        """
        for tier in self.tiers:
            or_none("tell a policy about a turn", tier.served, turn)

    def away(self) -> tuple[str, ...]:
        """The kinds of the remote tiers that did not answer their last call in time."""
        return tuple(tier.kind.value for tier in self._remote if not tier.answers)

    def flush(self) -> None:
        """Return when everything put so far is written or dropped, and what fits is fetched."""
        self._prefetcher.flush()
        self._copies.flush()

    def close(self) -> None:
        """Write what waits and close every tier. Twice is harmless; leases stay readable until they
        are closed.
        """
        self._at_exit.detach()
        self._prefetcher.close()
        self._copies.close()
        for tier in self.tiers:
            or_none("close a tier", tier.close)
