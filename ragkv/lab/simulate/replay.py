"""The replay: a trace drives a tier of prefix blocks, which asks the policy objects of the live store."""

from dataclasses import dataclass

from ragkv.store.policies import OnEvict, Policy, PrefixTier

from .trace import Trace


@dataclass(frozen=True)
class Replay:
    """The result of one policy on a trace at one capacity."""

    policy: str
    capacity_blocks: int
    uncached: list[int]  # b of every request, in order


def replay(
    trace: Trace, policy: Policy, capacity_blocks: int, *, forced: bool = False, on_evict: OnEvict | None = None
) -> Replay:
    """Run `trace` through `policy` with a tier of `capacity_blocks`; `forced`: the conversation just served stays."""
    tier = PrefixTier(policy, capacity_blocks, on_evict)
    serve = tier.serve
    return Replay(policy.name, capacity_blocks, [serve(turn, forced) for turn in trace.turns])
