"""Every policy in a live ledger: after any sequence, capacity and leases are respected and the
sizes add up.
"""

from collections.abc import Container

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.simulate import ALL_POLICIES, make_any_policy
from ragkv.errors import StoreError
from ragkv.store.entry import EntryKey
from ragkv.store.policies import LRU, Eviction, Item, Policy, PolicySettings, TurnSize, make_policy
from ragkv.store.tiers.ledger import MOST_NEWS, Ledger, Slot

CAPACITY = 12
STEP = st.tuples(
    st.sampled_from(["put", "put", "put", "lease", "unlease", "delete", "serve"]),
    st.sampled_from(["a", "b", "c", ""]),  # the conversation, or none
    st.integers(0, 5),  # the block, or the chunk
    st.integers(1, 4),  # its size
)


class Shelf:
    """A ledger of items without bytes, at a time that a test sets."""

    def __init__(self, capacity: int, policy: Policy) -> None:
        self.now = 0.0
        self.evicted: list[EntryKey] = []
        self.ledger = Ledger[EntryKey](capacity, policy, self.evicted.append, lambda: self.now)

    def add(self, item: Item, now: float = 0.0) -> bool:
        """Whether there was space for `item`, or was made, and it was added."""
        self.now = now
        fits = self.ledger.make_room(item)
        if fits:
            self.ledger.add(item, item.key)
        return fits

    def lease(self, key: EntryKey) -> Slot[EntryKey] | None:
        """The slot of `key`, leased now."""
        return self.ledger.lease(key, lambda slot: slot)


class ShelfModel:
    """A shelf, and the leases that a caller holds."""

    def __init__(self, name: str, xi: int) -> None:
        self.shelf = Shelf(CAPACITY, make_any_policy(name, PolicySettings(xi_blocks=xi)))
        self.ledger = self.shelf.ledger
        self.leases: list[Slot[EntryKey]] = []

    def do(self, what: str, group: str, index: int, size: int) -> None:
        self.shelf.now += 1
        key = EntryKey(f"{group or 'chunk'}{index}")
        slot = self.ledger.get(key)
        if what == "put" and slot is None:
            item = Item(key, size, group, index if group else 0)
            self.shelf.add(item, self.shelf.now)
        elif what == "lease" and slot is not None:
            assert self.shelf.lease(key) is slot
            self.leases.append(slot)
        elif what == "unlease" and self.leases:
            self.ledger.release(self.leases.pop(index % len(self.leases)))
        elif what == "delete":
            self.ledger.remove(key)
        elif what == "serve" and group:
            now = self.shelf.now
            length = index + size
            since = 1.0 if index else None
            turn = TurnSize(now, int(now), group, length, index, length, 1 + index, since)
            self.ledger.notify_policy(lambda policy: policy.turn_prefilled(turn))

    def check(self) -> None:
        held = self.ledger.slots()
        assert self.ledger.used_bytes == sum(slot.item.size for slot in held) <= CAPACITY
        leased = [lease for lease in self.leases if self.ledger.get(lease.item.key) is lease]
        assert all(slot.leases == sum(lease is slot for lease in leased) for slot in held)
        evicted = set(self.shelf.evicted)
        assert not any(lease.item.key in evicted for lease in leased)
        self.shelf.evicted.clear()


@pytest.mark.parametrize("name", sorted(ALL_POLICIES))
@given(steps=st.lists(STEP, max_size=60), xi=st.integers(0, 3))
@settings(max_examples=60)
def test_every_policy_keeps_the_ledger_within_capacity_and_its_leases_held(
    name: str, steps: list[tuple[str, str, int, int]], xi: int
) -> None:
    model = ShelfModel(name, xi)
    for step in steps:
        model.do(*step)
        model.check()


@pytest.mark.parametrize("name", sorted(ALL_POLICIES))
def test_a_refused_put_leaves_the_policy_unchanged(name: str) -> None:
    shelf = Shelf(4, make_any_policy(name))
    assert shelf.add(Item(EntryKey("held"), 4))
    slot = shelf.lease(EntryKey("held"))
    assert slot is not None
    assert not shelf.add(Item(EntryKey("more"), 1), 1.0)
    assert shelf.evicted == []
    shelf.ledger.release(slot)
    eviction = shelf.ledger.informed_policy().victim((), 2.0)
    assert eviction is not None and eviction.group == "held"


class TellingLRU(LRU):
    """An LRU that notes what it is told and asked."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def held(self, group: str, blocks: int, size: int, now: float) -> None:
        self.calls.append(f"held {group} {blocks}")
        super().held(group, blocks, size, now)

    def used(self, group: str, now: float) -> None:
        self.calls.append(f"used {group}")
        super().used(group, now)

    def victim(self, leased: Container[str], now: float) -> Eviction | None:
        self.calls.append("victim")
        return super().victim(leased, now)


def test_a_policy_is_told_what_happened_in_order_when_something_must_go() -> None:
    policy = TellingLRU()
    shelf = Shelf(2, policy)
    for number, name in enumerate("ab"):
        assert shelf.add(Item(EntryKey(name), 1), float(number))
    slot = shelf.lease(EntryKey("a"))
    assert slot is not None
    shelf.ledger.release(slot)
    assert policy.calls == [], "there was room"
    assert shelf.add(Item(EntryKey("c"), 1), 3.0)
    told = ["held a 1", "held b 1", "used a", "held c 1", "victim", "held b 0", "held c 1"]
    shelf.ledger.informed_policy()
    assert policy.calls == told and shelf.evicted == [EntryKey("b")]


def test_a_policy_that_is_asked_nothing_is_told_before_there_is_much_to_tell() -> None:
    policy = TellingLRU()
    shelf = Shelf(2, policy)
    assert shelf.add(Item(EntryKey("a"), 1))
    for _ in range(MOST_NEWS):
        slot = shelf.lease(EntryKey("a"))
        assert slot is not None
        shelf.ledger.release(slot)
    assert 0 < policy.calls.count("used a") <= MOST_NEWS


def test_a_conversation_loses_its_tail_first() -> None:
    shelf = Shelf(4, make_policy("lru"))
    assert all(shelf.add(Item(EntryKey(f"a{index}"), 1, "a", index)) for index in range(4))
    assert shelf.add(Item(EntryKey("b0"), 2, "b", 0), 1.0)
    assert [key.digest for key in shelf.evicted] == ["a3", "a2"]


def test_a_block_that_would_evict_its_own_conversation_is_refused() -> None:
    shelf = Shelf(2, make_policy("lru"))
    assert [shelf.add(Item(EntryKey(f"a{index}"), 1, "a", index)) for index in range(4)] == [
        True,
        True,
        False,
        False,
    ]
    assert shelf.evicted == []


def test_free_blocks_are_evicted_before_blocks_of_older_use() -> None:
    shelf = Shelf(6, make_any_policy("t-lru", PolicySettings(xi_blocks=3, new_blocks=1)))
    for number, group in enumerate("ab"):
        turn = TurnSize(float(number), number, group, 4, 0, 4)
        shelf.ledger.notify_policy(lambda policy, turn=turn: policy.turn_prefilled(turn))
        for index in range(4):
            shelf.add(Item(EntryKey(f"{group}{index}"), 1, group, index), float(number))
    # budget 4 + 1 - 3 = 2 each; b's third and fourth blocks are free too, but younger
    assert [key.digest for key in shelf.evicted] == ["a3", "a2"]
    assert [slot.item.key.digest for slot in shelf.ledger.slots()] == [
        "a0",
        "a1",
        "b0",
        "b1",
        "b2",
        "b3",
    ]


class Wrong(LRU):
    """A policy that evicts what `eviction` says, whatever is held."""

    eviction: Eviction | None = None

    def victim(self, leased: Container[str], now: float) -> Eviction | None:
        return self.eviction


@pytest.mark.parametrize(
    "eviction", [None, Eviction("b"), Eviction("a", 5), Eviction("c", whole=True)]
)
def test_a_policy_that_evicts_nothing_ends_the_put_and_hangs_nothing(
    eviction: Eviction | None,
) -> None:
    policy = Wrong()
    shelf = Shelf(2, policy)
    assert shelf.add(Item(EntryKey("a0"), 2, "a", 0))
    policy.eviction = eviction
    new = Item(EntryKey("new"), 1, "new", 0)
    with pytest.raises(StoreError, match="The policy"):
        shelf.add(new)
    policy.eviction = Eviction("a")
    assert shelf.add(new) and [slot.item for slot in shelf.ledger.slots()] == [new]


class Deaf(LRU):
    """A policy that fails at each use of `a`."""

    def used(self, group: str, now: float) -> None:
        if group == "a":
            raise RuntimeError("a")
        super().used(group, now)


def test_a_policy_that_fails_loses_no_other_news_and_fails_no_put() -> None:
    shelf = Shelf(2, Deaf())
    items = [Item(EntryKey(name), 1, name, 0) for name in "abc"]
    shelf.add(items[0])
    shelf.add(items[1])
    slot = shelf.lease(items[0].key)
    assert slot is not None
    shelf.ledger.release(slot)
    assert shelf.add(items[2])
    assert {one.item.key.digest for one in shelf.ledger.slots()} == {"b", "c"}
