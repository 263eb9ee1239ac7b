"""After any sequence of operations: the capacity holds, leased entries are there, and the counts
equal a recount.
"""

import tempfile
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from ragkv.registry import CODECS
from ragkv.store.entry import Entry
from ragkv.store.policies import LRU
from ragkv.store.stored_form import stored_form
from ragkv.store.tiers import DiskTier, Lease, MemoryTier, Tier

from .entries import as_stored, ids_of, make_entry, read_all, same, with_codec

NUMBERS = st.integers(0, 7)
ENTRIES = [  # of three sizes in two codecs
    make_entry(
        number, layers=1 + number % 3, identity=with_codec(sorted(CODECS)[number % len(CODECS)])
    )
    for number in range(8)
]
AS_STORED = [as_stored(entry) for entry in ENTRIES]


class AnyTier(RuleBasedStateMachine):
    """Puts, leases, deletions and restarts of one tier, compared with a model that knows only the
    open leases.
    """

    def __init__(self) -> None:
        super().__init__()
        self.tier = self.open()
        self.leases: list[tuple[int, Lease]] = []
        self.live: set[int] = set()  # ids of leases whose entry was not deleted since

    def open(self) -> Tier:
        raise NotImplementedError

    def recount(self) -> int:
        """The bytes held, counted again."""
        raise NotImplementedError

    @rule(number=NUMBERS)
    def put(self, number: int) -> None:
        stored = self.tier.put(stored_form(ENTRIES[number]))
        assert self.tier.contains(ENTRIES[number].info.key) == stored

    @rule(number=NUMBERS)
    def lease(self, number: int) -> None:
        entry = ENTRIES[number]
        held = self.tier.contains(entry.info.key)
        lease = self.tier.lease(entry.info.identity, ids_of(number))
        assert (lease is not None) == held
        if lease is not None:
            assert same(read_all(lease), AS_STORED[number])
            self.leases.append((number, lease))
            self.live.add(id(lease))

    @rule(choice=st.integers(0, 100))
    def unlease(self, choice: int) -> None:
        if self.leases:
            _, lease = self.leases.pop(choice % len(self.leases))
            self.live.discard(id(lease))
            lease.close()

    @rule(number=NUMBERS)
    def delete(self, number: int) -> None:
        held = self.tier.contains(ENTRIES[number].info.key)
        assert self.tier.delete(ENTRIES[number].info.key) == held
        self.live -= {id(lease) for leased, lease in self.leases if leased == number}

    @invariant()
    def used_bytes_stay_within_the_capacity(self) -> None:
        stats = self.tier.stats()
        assert 0 <= stats.used_bytes <= stats.capacity_bytes

    @invariant()
    def counts_equal_a_recount(self) -> None:
        stats = self.tier.stats()
        assert stats.used_bytes == self.recount()
        assert stats.entries == len(list(self.tier.infos()))

    @invariant()
    def leased_entries_are_there_and_readable(self) -> None:
        for number, lease in self.leases:
            assert same(read_all(lease), AS_STORED[number])
            if id(lease) in self.live:
                assert self.tier.contains(ENTRIES[number].info.key)

    def teardown(self) -> None:
        for _, lease in self.leases:
            lease.close()
        self.tier.close()


class AnyMemoryTier(AnyTier):
    def open(self) -> Tier:
        return MemoryTier(5 * make_entry(layers=1).size_bytes, LRU())

    def recount(self) -> int:
        by_key: dict[str, Entry] = {entry.info.key: entry for entry in ENTRIES}
        return sum(stored_form(by_key[info.key]).size_bytes for info in self.tier.infos())


class AnyDiskTier(AnyTier):
    def __init__(self) -> None:
        self.place = tempfile.TemporaryDirectory()
        super().__init__()

    def open(self) -> Tier:
        return DiskTier(self.place.name, 3 * 1200, LRU())  # entries have 800 to 1,200 bytes

    def recount(self) -> int:
        return sum(path.stat().st_size for path in Path(self.place.name).glob("entries/*/*"))

    @rule()
    def restart(self) -> None:
        for _, lease in self.leases:
            lease.close()
        self.leases = []
        self.live = set()
        before = {info.key for info in self.tier.infos()}
        self.tier.close()
        self.tier = self.open()
        assert {info.key for info in self.tier.infos()} == before

    def teardown(self) -> None:
        super().teardown()
        self.place.cleanup()


TestMemoryTier = AnyMemoryTier.TestCase
TestMemoryTier.settings = settings(max_examples=40, stateful_step_count=25)
TestDiskTier = AnyDiskTier.TestCase
TestDiskTier.settings = settings(max_examples=15, stateful_step_count=15)
