"""A trace through a live memory tier: tiny entries, looked up and put block by block as a
conversation does.
"""

from dataclasses import replace

from ragkv.store.policies import Policy, PolicySettings, TurnSize, make_policy
from ragkv.store.stored_form import stored_form
from ragkv.store.tiers import MemoryTier
from tests.store.entries import IDENTITY, ids_of, make_entry

from .replay import Replay, ReplaySetting, Report, report_of
from .trace import Trace


class LiveTier:
    """A memory tier that is served turns at their own times."""

    def __init__(self, policy: Policy, capacity_blocks: int) -> None:
        # of blocks, by conversation and place
        self._now = 0.0
        self._numbers = dict[tuple[str, int], int]()
        self._block = make_entry(layers=1)
        self.tier = MemoryTier(
            capacity_blocks * self._block.size_bytes, policy, clock=lambda: self._now
        )

    def serve(self, turn: TurnSize) -> int:
        """Read the history, report the turn to the policy, put the missing blocks in order; the
        uncached blocks.
        """
        self._now = turn.at
        found = list[bool]()
        numbers = [
            self._numbers.setdefault((turn.group, at), len(self._numbers))
            for at in range(turn.length)
        ]
        for number in numbers:
            lease = self.tier.lease(IDENTITY, ids_of(number))
            found.append(lease is not None)
            if lease is not None:
                lease.close()
        self.tier.ledger.notify_policy(lambda policy: policy.turn_prefilled(turn))
        for index, number in enumerate(numbers):
            if not found[index]:
                ids = tuple(ids_of(number))
                key = IDENTITY.key(ids)
                group = turn.group
                info = replace(self._block.info, key=key, token_ids=ids, group=group, index=index)
                self.tier.put(stored_form(replace(self._block, info=info)))
        held = found.index(False) if False in found else len(found)
        return turn.prompt - min(held, turn.shared)


def simulate_live(trace: Trace, name: str, setting: ReplaySetting) -> Report:
    """The trace through a live tier under a policy that knows what a live store tells it: xi, and
    the turns so far.
    """
    tier = LiveTier(
        make_policy(name, PolicySettings(block_tokens=trace.block_tokens)), setting.capacity_blocks
    )
    # as a profile does for store.ttft_target_ms
    tier.tier.ledger.notify_policy(lambda policy: policy.retarget(setting.xi_blocks))
    done = Replay(setting.capacity_blocks, list(map(tier.serve, trace.turns)))
    return report_of(name, trace, done, setting)
