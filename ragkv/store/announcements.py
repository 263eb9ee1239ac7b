"""What a store is told, and what it says of itself.

The scheduler announces waiting requests (`queued`, `started`, `left`): policies protect their
entries, and `prefetch.py` copies them up before the requests start. A `Placement` may keep entries
out of memory. A question that need not wait meets none of this.
"""

from dataclasses import dataclass

from .copying import Placement, or_none
from .prefetch import Prefetcher, PrefetchHint
from .tiers import Tier, TierKind, TierStats
from .upkeep import Upkeep


@dataclass(frozen=True, slots=True)
class StoreStats:
    """What the store holds, and what happened since it was opened."""

    tiers: tuple[TierStats, ...]  # fastest first
    pending_bytes: int  # waiting to be written, or to be promoted
    # entries not written to a tier below memory: the write buffer was full, or the write failed
    dropped_writes: int
    prefetched: int = 0  # entries copied to the fastest tier for waiting requests
    announced: int = 0  # requests that wait, or have not opened their entries yet


class Announcements(Upkeep):
    """The part of a `Store` that is told what waits, and what it holds. All methods are thread-safe."""

    _remote: tuple[Tier, ...]  # those of other machines
    _prefetcher: Prefetcher

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

    def retarget(self, xi_blocks: int) -> None:
        """Tell the policies of all tiers their latency threshold, in blocks."""
        for tier in self.tiers:
            tier.tell(lambda policy: policy.retarget(xi_blocks))

    def place_by(self, placement: Placement) -> None:
        """From now on ask `placement` which entries, that a tier below has, are stored and copied
        up to memory.
        """
        self._copies.placement = placement
        self.place_again()

    def place_again(self) -> None:
        """Let the entries leave memory that do not belong there, as far as a disk has them."""
        for memory in self._local:
            if memory.kind is TierKind.MEMORY:
                for info in memory.infos():
                    is_below = any(one.contains(info.key) for one in self._local[1:])
                    if is_below and not self._copies.in_memory(info, 0, used=True):
                        memory.delete(info.key)

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

    def stats(self) -> StoreStats:
        """Counts and bytes of every tier and of the background threads."""
        tiers = tuple(tier.stats() for tier in self.tiers)
        copies = self._copies
        ahead = self._prefetcher
        return StoreStats(
            tiers, copies.pending_bytes, copies.dropped, ahead.fetched, ahead.requests
        )

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
