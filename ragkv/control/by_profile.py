"""Decides by a profile, and corrects it by what passes took."""

from collections.abc import Iterator
from dataclasses import replace

from ragkv.fusion import PassResult, Plan, Recompute

from .decision import choose_all, choose_computed
from .estimators import load_s, ttft_s
from .method import Method
from .profile import Profile, TierSpeed
from .profile_in_use import COMPUTE, ProfileInUse
from .reasons import Why
from .token_counts import TokenCounts, loads_of


def decided(
    plan: Plan, method: Method, in_use: ProfileInUse, profile: Profile
) -> tuple[Plan, Recompute]:
    """The plan with some spans computed, and how the others are recomputed.

    Decides by `profile`, corrected by recent speeds. Where the ratio is given, only chunks on
    shared storage may be computed instead.

    Raises `RagKVError` if a tier of the prompt was not measured.
    """
    spans, loads = loads_of(plan)
    counts = TokenCounts.of(plan, method.selector, in_use.adapter.layer_count)
    profile, corrected = in_use.corrected(profile)
    if method.controlled:
        decision = choose_all(profile, counts, loads, method.ratio)
    else:
        speeds = in_use.store.speeds()
        loads = [replace(one, fixed=one.fixed or one.tier not in speeds) for one in loads]
        decision = choose_computed(profile, counts, loads, method.ratio)
    computed = [spans[index] for index in decision.computed_loads]
    plan = plan.computing(computed, Why.SLOWER if decision.pays else Why.NO_GAIN)
    return plan, Recompute(
        method.selector,
        decision.ratio,
        early=decision.early,
        reasons=(*decision.reasons, *(corrected if decision.reasons else ())),
        expected_s=decision.ttft_s,
    )


def outcomes_of(
    plan: Plan, recompute: Recompute, passed: PassResult, layers: int, profile: Profile
) -> Iterator[tuple[str, float, float]]:
    """What a pass through `layers` layers took of a tier or of `COMPUTE`, in seconds, and what
    `profile` had estimated. Steps of other requests do not count.
    """
    spans, loads = loads_of(plan)
    tiers = {kind: speed.times(0.0) for kind, speed in profile.tiers.items()}
    tiers |= {load.tier: TierSpeed(0.0, 0.0) for load in loads if load.tier not in tiers}
    at_once = replace(profile, tiers=tiers, copy_bytes_per_s=None)
    if passed.prompts == 1:  # else the time is that of all
        counts = TokenCounts.of(plan, recompute.selector, layers, recompute.early)
        computing_s = ttft_s(at_once, counts, recompute.ratio, loads)
        yield COMPUTE, passed.pass_s - passed.load_s - passed.others_s, computing_s
    leases = [span.lease for span in spans if span.lease and not span.lease.in_place]
    kinds = {lease.kind for lease in leases}
    if len(kinds) == 1 and (tier := kinds.pop()) in profile.tiers:
        # the rest is computed
        share = passed.bytes_by_tier.get(tier, 0) / sum(one.stored_bytes for one in leases)
        loading_s = load_s(profile, [load for load in loads if load.tier == tier]) * profile.layers
        yield tier, passed.read_s, share * loading_s
