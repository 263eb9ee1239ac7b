"""The live store under each policy makes the evictions of the simulator."""

import random

import pytest

from ragkv.lab.simulate import ALL_POLICIES, Trace, make_any_policy, replay
from ragkv.lab.simulate.chunks import Read, futures, replay_chunks
from ragkv.store import Entry, MemoryTier, Policy, Store, TurnSize
from ragkv.store.policies import PolicySettings
from ragkv.store.tiers.ledger import Slot
from tests.store.entries import IDENTITY, make_entry

from .reference import random_rows


class Clock:
    """The time of the request being served."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


class LoggedMemory(MemoryTier):
    """A memory tier that logs the keys it evicts."""

    def __init__(self, capacity: int, policy: Policy, clock: Clock) -> None:
        super().__init__(capacity, policy, clock=clock)
        self.log: list[str] = []

    def _evict(self, slot: Slot[Entry]) -> None:
        self.log.append(slot.item.key.chunk)
        super()._evict(slot)


def tiny(number: int, tokens: int) -> Entry:
    """The entry of a passage, a 64th of its length."""
    return make_entry(number, tokens=max(1, tokens // 64), layers=1, scored=False)


def run_live(store: Store, clock: Clock, policy: Policy, reads: list[Read], entries: list[Entry]) -> None:
    """Do what an engine does: look each chunk up, and put those not found."""
    nexts = futures(reads)
    for number, (read, entry) in enumerate(zip(reads, entries, strict=True)):
        clock.now = read.at
        lease = store.lease(IDENTITY, entry.info.token_ids)
        if lease is not None:
            lease.close()
        if policy.needs_future:
            store.served(TurnSize(read.at, number, read.key, 1, 1, 1, 1, None, nexts[number]))
        if lease is None:
            store.put_durably(entry)


def compare(name: str, asked: list[tuple[float, int, int]]) -> int:
    """Assert equal evictions and hits of one policy in the live store and the simulator; returns their number."""
    made = {number: tiny(number, tokens) for _, number, tokens in asked}
    entries = [made[number] for _, number, _ in asked]
    reads = [Read(at, e.info.key.chunk, e.size_bytes) for (at, _, _), e in zip(asked, entries, strict=True)]
    capacity = sum(entry.size_bytes for entry in made.values()) // 10
    expected: list[str] = []
    done = replay_chunks(reads, make_any_policy(name), capacity, on_evict=expected.append)
    clock, policy = Clock(), make_any_policy(name)
    tier = LoggedMemory(capacity, policy, clock)
    with Store([tier], write_buffer_bytes=0) as store:
        run_live(store, clock, policy, reads, entries)
        assert tier.log == expected
        assert store.stats().tiers[0].hits == done.hits
    return len(expected)


@pytest.mark.parametrize("name", sorted(ALL_POLICIES))
def test_the_live_store_evicts_the_chunks_of_the_simulator_in_the_same_order_on_a_generated_load(name: str) -> None:
    draw = random.Random(0)
    chunks = [min(199, int(draw.paretovariate(0.6))) for _ in range(1_500)]
    assert (
        compare(name, [(place // 6 * 1.0, number, 50 + number * 37 % 400) for place, number in enumerate(chunks)]) > 100
    )


def run_session(tier: MemoryTier, turn: TurnSize, blocks: dict[tuple[str, int], Entry]) -> None:
    """Do what a session does: read its history, report the turn to the policy, put the new blocks in order."""
    for index in range(turn.length):
        lease = tier.lease(IDENTITY, blocks[turn.group, index].info.token_ids)
        if lease is not None:
            lease.close()
    tier.served(turn)
    for index in range(turn.length):
        tier.put(blocks[turn.group, index])


# The others decide on whole sessions, or once a turn, whereas a live store overflows at every block.
BY_BLOCK = sorted(set(ALL_POLICIES) - {"lookahead"})


@pytest.mark.parametrize("name", BY_BLOCK)
def test_a_live_tier_trims_histories_to_the_prefixes_of_the_simulator(name: str) -> None:
    for seed in range(12):
        trace = Trace.of(random_rows(seed, contracting=False), 16)
        settings = PolicySettings(
            xi_blocks=3,
            new_blocks=trace.expected_new_blocks,
            new_blocks_seen=tuple(trace.new_blocks),
            turn_rate_per_s=0.2,
            end_rate_per_s=0.05,
            threshold_tokens=64,
            capacity_blocks=12,
        )
        numbers = {group: 1000 * place for place, group in enumerate(sorted({turn.group for turn in trace.turns}))}
        blocks = {
            (group, index): make_entry(number + index, layers=1, scored=False, group=group, index=index)
            for group, number in numbers.items()
            for index in range(300)
        }
        size = next(iter(blocks.values())).size_bytes
        clock = Clock()
        tier = MemoryTier(12 * size, make_any_policy(name, settings), clock=clock)
        for number, turn in enumerate(trace.turns):
            clock.now = turn.at
            run_session(tier, turn, blocks)
            live: dict[str, int] = {}
            for info in tier.infos():
                live[info.group] = max(live.get(info.group, 0), info.index + 1)
            assert (seed, number, live) == (seed, number, held_after(trace, number + 1, name, settings))


def held_after(trace: Trace, turns: int, name: str, settings: PolicySettings) -> dict[str, int]:
    """Blocks the simulator holds of each conversation after so many turns."""
    held: dict[str, int] = {}
    policy = make_any_policy(name, settings)
    report_held = policy.held

    def note(group: str, blocks: int, size: int, now: float) -> None:
        held[group] = blocks
        report_held(group, blocks, size, now)

    policy.held = note  # type: ignore[method-assign]
    replay(Trace(trace.name, 16, trace.turns[:turns]), policy, 12)
    return {group: blocks for group, blocks in held.items() if blocks}
