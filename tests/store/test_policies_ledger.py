"""Every policy in a live ledger: after any sequence, capacity and leases are respected and the
sizes add up.
"""

from collections.abc import Container

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.simulate import ALL_POLICIES, make_any_policy
from ragkv.store import LRU, EntryKey, Item, Policy, TurnSize, make_policy
from ragkv.store.policies import Cut, PolicySettings
from ragkv.store.tiers.ledger import MOST_NEWS, Ledger, Slot

CAPACITY = 12
STEP = st.tuples(
    st.sampled_from(["put", "put", "put", "lease", "unlease", "delete", "serve"]),
    st.sampled_from(["a", "b", "c", ""]),  # the conversation, or none
    st.integers(0, 5),  # the block, or the chunk
    st.integers(1, 4),  # its size
)


class LedgerModel:
    """A ledger, and the leases that a caller holds."""

    def __init__(self, name: str, xi: int) -> None:
        policy = make_any_policy(name, PolicySettings(xi_blocks=xi, threshold_tokens=32))
        self.ledger: Ledger[None] = Ledger(CAPACITY, policy, self.evicted)
        self.leases: list[Slot[None]] = []
        self.now = 0.0

    def do(self, what: str, group: str, index: int, size: int) -> None:
        self.now += 1
        key = EntryKey(f"{group or 'chunk'}{index}")
        slot = self.ledger.get(key)
        if what == "put" and slot is None:
            item = Item(key, size, group, index if group else 0)
            if self.ledger.make_space(item, self.now):
                self.ledger.add(item, None, self.now)
        elif what == "lease" and slot is not None:
            self.ledger.pin(slot)
            self.ledger.used(slot, self.now)
            self.leases.append(slot)
        elif what == "unlease" and self.leases:
            self.ledger.unpin(self.leases.pop(index % len(self.leases)))
        elif what == "delete":
            self.ledger.remove(key)
        elif what == "serve" and group:
            turn = TurnSize(
                self.now,
                int(self.now),
                group,
                index + size,
                index,
                index + size,
                1 + index,
                1.0 if index else None,
            )
            self.ledger.served(turn, self.now)

    def evicted(self, slot: Slot[None]) -> None:
        """A victim has left the ledger already, and no lease holds it."""
        assert self.ledger.get(slot.item.key) is not slot
        assert all(lease is not slot for lease in self.leases)

    def check(self) -> None:
        held = list(self.ledger)
        assert self.ledger.used_bytes == sum(slot.item.size for slot in held) <= CAPACITY
        leased = [lease for lease in self.leases if self.ledger.get(lease.item.key) is lease]
        assert all(slot.pins == sum(lease is slot for lease in leased) for slot in held)


@pytest.mark.parametrize("name", sorted(ALL_POLICIES))
@given(steps=st.lists(STEP, max_size=60), xi=st.integers(0, 3))
@settings(max_examples=60)
def test_every_policy_keeps_the_ledger_within_capacity_and_its_leases_held(
    name: str, steps: list[tuple[str, str, int, int]], xi: int
) -> None:
    model = LedgerModel(name, xi)
    for step in steps:
        model.do(*step)
        model.check()


def ledger_of(capacity: int, policy: Policy) -> tuple[Ledger[None], list[EntryKey]]:
    """A ledger, and the keys that it evicts from now on."""
    evicted: list[EntryKey] = []
    return Ledger(capacity, policy, lambda slot: evicted.append(slot.item.key)), evicted


def add(ledger: Ledger[None], item: Item, now: float = 0.0) -> bool:
    """Whether the ledger made space for `item` and added it."""
    fits = ledger.make_space(item, now)
    if fits:
        ledger.add(item, None, now)
    return fits


@pytest.mark.parametrize("name", sorted(ALL_POLICIES))
def test_a_refused_put_leaves_the_policy_unchanged(name: str) -> None:
    ledger, evicted = ledger_of(4, make_any_policy(name))
    assert add(ledger, Item(EntryKey("held"), 4))
    slot = ledger.get(EntryKey("held"))
    assert slot is not None
    ledger.pin(slot)
    assert not ledger.make_space(Item(EntryKey("more"), 1), 1.0)
    assert evicted == []
    ledger.unpin(slot)
    cut = ledger.policy.victim((), 2.0)
    assert cut is not None and cut.group == "held"


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

    def victim(self, pinned: Container[str], now: float) -> Cut | None:
        self.calls.append("victim")
        return super().victim(pinned, now)


def test_a_policy_is_told_what_happened_in_order_when_something_must_go() -> None:
    policy = TellingLRU()
    ledger, evicted = ledger_of(2, policy)
    for number, name in enumerate("ab"):
        assert add(ledger, Item(EntryKey(name), 1), float(number))
    slot = ledger.get(EntryKey("a"))
    assert slot is not None
    ledger.used(slot, 2.0)
    assert policy.calls == [], "there was room"
    assert add(ledger, Item(EntryKey("c"), 1), 3.0)
    told = ["held a 1", "held a 1", "held b 1", "held b 1", "used a", "held c 1", "victim"]
    assert policy.calls == told and evicted == [EntryKey("b")]


def test_a_policy_that_is_asked_nothing_is_told_before_there_is_much_to_tell() -> None:
    policy = TellingLRU()
    ledger, _ = ledger_of(2, policy)
    assert add(ledger, Item(EntryKey("a"), 1))
    slot = ledger.get(EntryKey("a"))
    assert slot is not None
    for number in range(MOST_NEWS):
        ledger.used(slot, float(number))
    assert 0 < policy.calls.count("used a") <= MOST_NEWS


def test_a_conversation_loses_its_tail_first() -> None:
    ledger, evicted = ledger_of(4, make_policy("lru"))
    assert all(add(ledger, Item(EntryKey(f"a{index}"), 1, "a", index)) for index in range(4))
    assert ledger.make_space(Item(EntryKey("b0"), 2, "b", 0), 1.0)
    assert [key.digest for key in evicted] == ["a3", "a2"]


def test_a_block_that_would_evict_its_own_conversation_is_refused() -> None:
    ledger, evicted = ledger_of(2, make_policy("lru"))
    assert [add(ledger, Item(EntryKey(f"a{index}"), 1, "a", index)) for index in range(4)] == [
        True,
        True,
        False,
        False,
    ]
    assert evicted == []


def test_free_blocks_are_evicted_before_blocks_of_older_use() -> None:
    ledger, evicted = ledger_of(
        6, make_any_policy("t-lru", PolicySettings(xi_blocks=3, new_blocks=1))
    )
    for number, group in enumerate("ab"):
        ledger.served(TurnSize(float(number), number, group, 4, 0, 4), float(number))
        for index in range(4):
            add(ledger, Item(EntryKey(f"{group}{index}"), 1, group, index), float(number))
    # budget 4 + 1 - 3 = 2 each; b's third and fourth blocks are free too, but younger
    assert [key.digest for key in evicted] == ["a3", "a2"]
    assert [slot.item.key.digest for slot in ledger] == ["a0", "a1", "b0", "b1", "b2", "b3"]
