"""The loading controller: one decision for each request (CacheBlend section 5.2).

Without a profile, or with one that lacks a tier of the prompt, a request is served at r*, and its
report says why. If fusing would still compute most rows of that prompt, all of them are computed.
`by_profile.py` decides with a profile.
"""

from dataclasses import dataclass, replace

from ragkv.errors import RagKVError
from ragkv.fusion import PassResult, Plan, Recompute, Selector, SpanState, budget, with_floor

from .by_profile import decided, outcomes_of
from .method import Method, Methods
from .profile_in_use import ProfileInUse
from .reasons import Reason, Why

# Without a profile, a prompt is computed whole if fusing computes so much of it: small passes
# take longer for each row, and placing comes on top.
MOST_ROWS = 0.8


@dataclass(eq=False)
class Controller:
    """The decisions of one engine."""

    in_use: ProfileInUse
    methods: Methods  # how each request is to be computed

    def decide(self, plan: Plan, method: Method) -> tuple[Plan, Recompute]:
        """The plan with some spans computed instead of loaded, and how the others are recomputed.

        The ratio is chosen if `method` leaves it open, and is at least that of `method`. At a given
        ratio only chunks of shared storage are computed.
        """
        if (profile := self.in_use.profile) is None:
            plan, recompute = self._counted(plan, method, self.in_use.refusal)
        else:
            try:
                plan, recompute = decided(plan, method, self.in_use, profile)
            except RagKVError as error:  # a tier was not measured
                plan, recompute = self._counted(plan, method, str(error))
        count = len(plan.candidates)
        ratio = recompute.ratio
        raised = with_floor(ratio, count, method.floor_tokens)
        notes = (*plan.notes, *method.notes)
        if raised != ratio:
            floor = budget(raised, count)
            wanted = budget(ratio, count)
            notes += (Reason.FLOOR.format(floor=floor, count=count, ratio=ratio, budget=wanted),)
            # the estimate was for fewer tokens
            recompute = replace(recompute, ratio=raised, expected_s=None)
        return replace(plan, notes=notes), recompute

    def _counted(self, plan: Plan, method: Method, error: str) -> tuple[Plan, Recompute]:
        """The decision without a profile, by counting rows: r*, or all computed. A given ratio is
        taken. `error` says why there is no profile.
        """
        if not method.controlled:
            return plan, Recompute(method.selector, method.ratio)
        fused = [span for span in plan.spans if span.state is SpanState.FUSED]
        share = rows_share(plan, method.selector, method.ratio, self.in_use.adapter.layer_count)
        reason = Reason.UNPROFILED.format(ratio=method.ratio, error=error)
        if fused and share > MOST_ROWS:
            plan = plan.computing(fused, Why.NO_GAIN)
            tokens = plan.token_ids.numel()
            reason = Reason.MOST_ROWS.format(tokens=tokens, share=share, error=error)
        return plan, Recompute(method.selector, method.ratio, reasons=(reason,))

    def learn_from(self, plan: Plan, recompute: Recompute, passed: PassResult) -> None:
        """Correct the profile's speeds by what a pass took, if there is a profile."""
        if (profile := self.in_use.profile) is not None:
            layers = self.in_use.adapter.layer_count
            for outcome in outcomes_of(plan, recompute, passed, layers, profile):
                self.in_use.note_outcome(*outcome)


def rows_share(plan: Plan, selector: Selector, ratio: float, layers: int) -> float:
    """The rows that fusing computes, of those of a full prefill, on a model of so many layers."""
    computed = plan.computed.numel()
    selected = budget(ratio, len(plan.candidates))
    asked_layers = selector.asked_layers(layers).stop if selected else 0
    asking = (computed - plan.unasked_rows - plan.leading_rows) * asked_layers / layers
    return (computed + selected + asking) / plan.token_ids.numel()
