"""What a store holds: counts, lists of its entries, and the sweep of those that nobody may use any
more (`gc`). None of this counts as a use.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from ragkv.errors import StoreError

from .copying import TierCopies
from .entry import EntryInfo, EntryKey, Identity
from .prefetch import Prefetcher
from .tiers import Tier, TierStats

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


@dataclass(frozen=True, eq=False)
class Contents:
    """The entries in all tiers of a store. All methods are thread-safe."""

    tiers: tuple[Tier, ...]  # fastest first
    copies: TierCopies  # between them
    prefetcher: Prefetcher

    def stats(self) -> StoreStats:
        """Counts and bytes of every tier and of the background threads."""
        tiers = tuple(tier.stats() for tier in self.tiers)
        copies = self.copies
        ahead = self.prefetcher
        return StoreStats(
            tiers, copies.pending_bytes, copies.dropped, ahead.fetched, ahead.requests
        )

    def infos(self) -> Iterator[EntryInfo]:
        """The entries in all tiers, each key once, in no particular order."""
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
        local = (tier for tier in self.tiers if not tier.is_remote)
        return list(itertools.islice((info for tier in local for info in tier.infos()), count))

    def block_keys(self) -> list[EntryKey]:
        """The keys of the blocks of conversations that are stored on this machine. Reads no
        file.
        """
        return [key for tier in self.tiers for key in tier.block_keys()]

    def refused(self, keep: Callable[[Identity], bool]) -> set[EntryKey]:
        """The keys that `gc` would drop."""
        self.flush()
        return {key for tier in self.tiers for key in _refused(tier, keep)}

    def gc(self, keep: Callable[[Identity], bool]) -> int:
        """Drop every entry whose identity `keep` refuses, or that this code cannot read, from every
        tier; the bytes freed, over all tiers that count them.
        """
        self.flush()
        before = self._used_bytes()
        with self.copies.deleting():
            for tier in self.tiers:
                for key in _refused(tier, keep):
                    tier.delete(key)
        return before - self._used_bytes()

    def flush(self) -> None:
        """Return when everything put so far is written or dropped, and what fits is fetched."""
        self.prefetcher.flush()
        self.copies.flush()

    def _used_bytes(self) -> int:
        return sum(tier.stats().used_bytes or 0 for tier in self.tiers)


def _refused(tier: Tier, keep: Callable[[Identity], bool]) -> list[EntryKey]:
    return [key for key, info in tier.scan() if info is None or not keep(info.identity)]


def deleted_everywhere(places: Iterable[T], delete: Callable[[T], bool]) -> int:
    """In how many of `places` there was something to delete. An error in one place keeps no other
    from being asked: the first one is raised at the end.
    """
    count = 0
    errors = []
    for place in places:
        try:
            count += delete(place)
        except StoreError as error:
            errors.append(error)
    if errors:
        raise errors[0]
    return count
