"""The live store under each policy makes the evictions of the simulator."""

import pytest

from benchmarks.simulate import ALL_POLICIES, Trace, make_any_policy, replay
from ragkv.store import Entry, MemoryTier, TurnSize
from ragkv.store.policies import PolicySettings
from tests.store.entries import IDENTITY, make_entry

from .reference import random_rows


class Clock:
    """The time of the request being served."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


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
