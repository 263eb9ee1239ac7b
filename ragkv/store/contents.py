"""Lists the entries of a store, and deletes those that nobody may use any more (`gc`). Neither
counts as a use of an entry.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from ragkv.errors import RagKVError

from .copying import TierCopies
from .entry import EntryInfo, EntryKey, Identity
from .tiers import Tier

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Contents:
    """The entries in all tiers of a store."""

    tiers: tuple[Tier, ...]  # fastest first
    copies: TierCopies  # between them

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
        ledgers = (tier.ledger for tier in self.tiers if tier.ledger is not None)
        return [key for ledger in ledgers for key in ledger.block_keys()]

    def refused(self, keep: Callable[[Identity], bool]) -> set[EntryKey]:
        """The keys that `gc` would drop."""
        self.copies.flush()
        return {key for tier in self.tiers for key in _refused(tier, keep)}

    def gc(self, keep: Callable[[Identity], bool]) -> int:
        """Drop every entry whose identity `keep` refuses, or that this code cannot read, from every
        tier; the bytes freed, over all tiers that count them.
        """
        self.copies.flush()
        before = self._used_bytes()
        with self.copies.deleting():
            for tier in self.tiers:
                for key in _refused(tier, keep):
                    tier.delete(key)
        return before - self._used_bytes()

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
        except RagKVError as error:
            errors.append(error)
    if errors:
        raise errors[0]
    return count
