"""The loading controller: one decision for each request (CacheBlend section 5.2).

Without a profile, or with one that lacks a tier of the prompt, a request is served at r*, and its
report says why. If fusing would still compute most rows of that prompt, all of them are computed.
With a profile, a chunk is computed if loading it from shared storage would take
longer, also if the caller gave the ratio.
"""

from dataclasses import dataclass, replace

from ragkv.config import PricesConfig
from ragkv.errors import RagKVError
from ragkv.fusion import PassResult, Plan, Selector, SpanState, budget, with_floor

from .decision import belongs_in_memory, choose_computed, decide
from .estimators import load_s, ttft_s
from .method import Method, Methods
from .present_profile import COMPUTE, PresentProfile
from .profile import TierSpeed
from .shape import Shape, loads_of

SLOWER = "computing is quicker than loading the stored KV"  # why a chunk is not reused
NO_GAIN = "reuse would bring the first token no sooner"  # why no chunk is
# Without a profile, a prompt is computed whole if fusing computes so much of it: small passes
# take longer for each row, and placing comes on top.
MOST_ROWS = 0.8


@dataclass(eq=False)
class Controller:
    """The decisions of one engine. Holds no request's state."""

    present: PresentProfile
    methods: Methods  # with that of requests which name none
    prices: PricesConfig

    def decide(self, plan: Plan, method: Method) -> Plan:
        """The plan with its ratio, which is chosen if `method` leaves it open, and with some spans
        computed instead of loaded.

        The ratio is at least that of `method`. At a given ratio only chunks of shared storage are
        computed.
        """
        plan = self._chosen(plan, method)
        count = len(plan.candidates)
        raised = plan.ratio
        if method.selector.uses_ratio:
            raised = with_floor(raised, count, method.floor_tokens)
        floor = () if raised == plan.ratio else (_floor_note(count, plan.ratio, raised),)
        return replace(plan, ratio=raised, notes=(*plan.notes, *method.notes, *floor))

    def _chosen(self, plan: Plan, method: Method) -> Plan:
        """The plan with some spans computed, the ratio, and why."""
        present = self.present
        if present.profile is None:
            return self._unprofiled(plan, method, present.refusal)
        spans, loads = loads_of(plan)
        shape = Shape.of(plan, method.selector, present.adapter.layer_count)
        ratio = method.ratio
        try:
            profile, corrected = present.corrected(present.profile)
            if method.controlled:
                decision = decide(profile, shape, loads, ratio)
            else:
                speeds = present.store.speeds()
                loads = [replace(one, fixed=one.fixed or one.tier not in speeds) for one in loads]
                decision = choose_computed(profile, shape, loads, ratio)
        except RagKVError as error:  # a tier was not measured
            return self._unprofiled(plan, method, str(error))
        computed = [spans[index] for index in decision.computed]
        plan = plan.computing(computed, SLOWER if decision.pays else NO_GAIN)
        why = (*decision.why, *(corrected if decision.why else ()))
        return replace(plan, ratio=decision.ratio, decision=why, expected_s=decision.ttft_s)

    def _unprofiled(self, plan: Plan, method: Method, error: str) -> Plan:
        """The decision by counting rows: r*, or all computed. A given ratio is taken."""
        if not method.controlled:
            return replace(plan, ratio=method.ratio)
        fused = [span for span in plan.spans if span.state is SpanState.FUSED]
        share = rows_share(plan, method.selector, method.ratio, self.present.adapter.layer_count)
        why = f"ratio {method.ratio:.0%} = r*: {error}"
        if fused and share > MOST_ROWS:
            plan = plan.computing(fused, NO_GAIN)
            why = (
                f"all is computed: of {plan.token_ids.numel()} tokens reuse would still compute "
                f"{share:.0%} ({error})"
            )
        return replace(plan, ratio=method.ratio, decision=(why,))

    def learn(self, plan: Plan, selector: Selector, passed: PassResult) -> None:
        """Compare what a pass took, without steps of other requests, with the profile's
        estimate.
        """
        present = self.present
        if (profile := present.profile) is None:
            return
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
            loading_s = (
                load_s(profile, [load for load in loads if load.tier == tier]) * profile.layers
            )
            present.compare(tier, passed.read_s, share * loading_s)

    def in_memory(self, tokens: int, used: bool, room: bool) -> bool:
        """Whether an entry of so many tokens belongs in memory, if a request `used` it, or if there
        is `room`; without a profile every entry does.
        """
        present = self.present
        if present.profile is None:
            return True
        method = self.methods.of({})
        profile, _ = present.corrected(present.profile)
        selector = method.selector
        asked = selector.asked_layers(present.adapter.layer_count)
        like = Shape(0, 0, 0, selection=selector.selection, asked_layers=asked.stop)
        return belongs_in_memory(profile, tokens, like, method.ratio, self.prices, used, room)


def rows_share(plan: Plan, selector: Selector, ratio: float, layers: int) -> float:
    """The rows that fusing computes, of those of a full prefill, on a model of so many layers."""
    forced = plan.forced.numel()
    selected = selector.wanted(ratio, len(plan.candidates))
    asked_layers = selector.asked_layers(layers).stop if selected else 0
    asking = (forced - plan.unasked_rows - plan.leading_rows) * asked_layers / layers
    return (forced + selected + asking) / plan.token_ids.numel()


def _floor_note(count: int, ratio: float, raised: float) -> str:
    return (
        f"floor: {budget(raised, count)} of {count} fused tokens were recomputed; "
        f"ratio {ratio:.3g} would be {budget(ratio, count)} (fusion.floor_tokens)"
    )
