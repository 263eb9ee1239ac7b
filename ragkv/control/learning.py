"""Compares what a pass took with the profile's estimate. The outcomes correct the profile's speeds."""

from dataclasses import replace

from ragkv.fusion import PassResult, Plan, Selector

from .estimators import load_s, ttft_s
from .present_profile import COMPUTE, PresentProfile
from .profile import Profile, TierSpeed
from .shape import Shape, loads_of


def learn(
    present: PresentProfile, profile: Profile, plan: Plan, selector: Selector, passed: PassResult
) -> None:
    """Note how a pass compares with the estimate of `profile`, the one in use. Steps of other
    requests do not count.
    """
    spans, loads = loads_of(plan)
    tiers = {kind: speed.times(0.0) for kind, speed in profile.tiers.items()}
    tiers |= {load.tier: TierSpeed(0.0, 0.0) for load in loads if load.tier not in tiers}
    at_once = replace(profile, tiers=tiers, copy_bytes_per_s=None)
    if passed.prompts == 1:  # else the time is that of all
        shape = Shape.of(plan, selector, present.adapter.layer_count)
        computing_s = ttft_s(at_once, shape, plan.ratio, loads)
        present.compare(COMPUTE, passed.pass_s - passed.load_s - passed.others_s, computing_s)
    leases = [span.lease for span in spans if span.lease and not span.lease.in_place]
    kinds = {lease.kind.value for lease in leases}
    if len(kinds) == 1 and (tier := kinds.pop()) in profile.tiers:
        # the rest is computed
        share = passed.bytes_by_tier.get(tier, 0) / sum(one.stored_bytes for one in leases)
        loading_s = load_s(profile, [load for load in loads if load.tier == tier]) * profile.layers
        present.compare(tier, passed.read_s, share * loading_s)
