"""The live store under each policy makes the evictions of the simulator."""

import pytest

from benchmarks.simulate import ALL_POLICIES, Trace, TraceSettings, make_any_policy, replay
from benchmarks.simulate.live import LiveTier
from benchmarks.simulate.policies import Trimming
from ragkv.store.policies import PolicySettings

from .reference import random_rows

# The others decide on whole sessions, or once a turn, whereas a live store overflows at every
# block and does not trim while there is room.
BY_BLOCK = sorted(
    name
    for name, policy in ALL_POLICIES.items()
    if name != "lookahead" and not issubclass(policy, Trimming)
)


@pytest.mark.parametrize("name", BY_BLOCK)
def test_a_live_tier_trims_histories_to_the_prefixes_of_the_simulator(name: str) -> None:
    for seed in range(12):
        trace = Trace.of(random_rows(seed, contracting=False), 16)
        settings = TraceSettings(
            xi_blocks=3,
            new_blocks=trace.expected_new_blocks,
            new_blocks_seen=tuple(trace.new_blocks),
            turn_rate_per_s=0.2,
            end_rate_per_s=0.05,
        )
        live_tier = LiveTier(make_any_policy(name, settings), 12)
        simulated = replay(trace, make_any_policy(name, settings), 12).uncached
        for number, turn in enumerate(trace.turns):
            assert (seed, number, live_tier.serve(turn)) == (seed, number, simulated[number])
            live: dict[str, int] = {}
            for info in live_tier.tier.infos():
                live[info.group] = max(live.get(info.group, 0), info.index + 1)
            assert (seed, number, live) == (
                seed,
                number,
                held_after(trace, number + 1, name, settings),
            )


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
