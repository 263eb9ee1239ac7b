"""Applies the loading controller to a request's plan: which chunks to load, and the ratio (CacheBlend section 5.2).

Holds the engine's profile. Without a profile a request is served at r*, and its report says why. An error of the
controller never fails a request. For shared storage the speed of the store's latest reads counts, not the speed when
the profile was made. A chunk that would load from shared storage slower than it is computed is computed, also when the
caller gave the ratio.
"""

import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from ragkv.config import PricesConfig
from ragkv.errors import ProfileError, RagKVError
from ragkv.fusion import AskingSelector, CheckingSelector, Plan, Selector, Span, SpanKind, SpanState
from ragkv.fusion.estimators import Load, Selection, Shape
from ragkv.fusion.profile import Profile, Subject, TierSpeed, load
from ragkv.fusion.selectors.static import Everything, Nothing
from ragkv.model import Adapter
from ragkv.runtime import cpu_model
from ragkv.store import Identity


@dataclass(frozen=True, slots=True)
class Controlled:
    """What the controller made of a plan."""

    plan: Plan
    ratio: float
    why: tuple[str, ...] = ()  # the decision in words; empty if there was none
    note: str | None = None  # why there was none


class LoadControl:
    """The controller with the engine's profile. Holds no request's state."""

    def __init__(
        self,
        subject: Subject,
        directory: str | Path | None,
        prices: PricesConfig,
        speeds: Callable[[], Mapping[str, float]] = dict,
    ) -> None:
        """Use the profile of `subject` saved in `directory`, if there is one. `speeds` gives those of remote tiers."""
        self.subject, self.prices, self._speeds = subject, prices, speeds
        self._profile: Profile | ProfileError
        try:
            if directory is None:
                raise ProfileError("The engine has no store directory, so no profile was saved for it.")
            self._profile = load(directory, subject)
        except ProfileError as error:
            self._profile = error

    @property
    def profile(self) -> Profile:
        """The profile in use. Raises `ProfileError`, which says why there is none."""
        if isinstance(self._profile, ProfileError):
            raise self._profile
        return self._profile

    def apply_profile(self, profile: Profile) -> None:
        """Use `profile` from now on. Raises `ProfileError` if it is of another model or machine."""
        profile.check(self.subject)
        self._profile = profile

    def decide(self, plan: Plan, selector: Selector, r_star: float) -> Controlled:
        """Choose the ratio and the spans to compute instead of load. Without a profile: no spans, and `r_star`."""
        from ragkv.fusion.controller import decide

        found = self._profile
        if isinstance(found, ProfileError):
            return Controlled(plan, r_star, note=f"controller: ratio {r_star:g} was used. {found}")
        spans = [span for span in plan.loaded() if span.kind is not SpanKind.PREFIX]  # the engine holds it
        try:
            decision = decide(self._updated(found), shape_of(plan, selector), _loads(spans), r_star, self.prices)
        except RagKVError as error:  # a tier that was not measured
            return Controlled(plan, r_star, note=f"controller: ratio {r_star:g} was used. {error}")
        return Controlled(_computing(plan, [spans[i] for i in decision.computed]), decision.ratio, decision.why)

    def shed_loads(
        self, plan: Plan, selector: Selector, ratio: float, row_layer_s: float | None, layers: int
    ) -> Controlled:
        """At a given ratio, compute the chunks that would load from shared storage slower than they are computed.

        Without a profile the time of a row in one of the model's `layers` layers is `row_layer_s`, measured lately.
        """
        speeds = self._speeds()
        spans = [span for span in plan.loaded() if span.kind is not SpanKind.PREFIX]
        remote = [
            i
            for i, span in enumerate(spans)
            if span.lease is not None and span.kind is SpanKind.CHUNK and span.lease.kind.value in speeds
        ]
        if not remote:
            return Controlled(plan, ratio)
        if isinstance(self._profile, Profile):
            from ragkv.fusion.controller import choose_computed

            try:
                loads = [replace(load, fixed=i not in remote) for i, load in enumerate(_loads(spans))]
                shape = shape_of(plan, selector)
                computed: Sequence[int] = choose_computed(self._updated(self._profile), shape, loads, ratio).computed
            except RagKVError:  # a tier that was not measured
                computed = ()
        else:
            computed = _slower([spans[i] for i in remote], remote, speeds, row_layer_s, layers)
        if not computed:
            return Controlled(plan, ratio)
        tiers = sorted({spans[i].lease.kind.value for i in computed})  # type: ignore[union-attr]
        rates = ", ".join(f"{tier} {speeds[tier] / 1e6:.3g} MB/s" for tier in tiers)
        note = f"{len(computed)} of {len(remote)} chunks were computed, which is quicker than loading them ({rates})"
        return Controlled(_computing(plan, [spans[i] for i in computed]), ratio, note=note)

    def _updated(self, profile: Profile) -> Profile:
        """`profile` with the present speeds of remote tiers. These include round trips: a slice adds no latency."""
        now = {kind: TierSpeed(0.0, 1.0 / speed) for kind, speed in self._speeds().items()}
        return replace(profile, tiers={**profile.tiers, **now}) if now else profile


def _slower(
    spans: Sequence[Span], numbers: Sequence[int], speeds: Mapping[str, float], row_layer_s: float | None, layers: int
) -> Sequence[int]:
    """The `numbers` of the spans to compute: as many as can be computed while the others load."""
    if row_layer_s is None:
        return ()
    load_s = [span.lease.stored_bytes / speeds[span.lease.kind.value] for span in spans if span.lease]
    compute_s = [len(span) * layers * row_layer_s for span in spans]
    order = sorted(range(len(spans)), key=lambda i: compute_s[i] - load_s[i])  # the largest gain first
    slow = [i for i in order if load_s[i] > compute_s[i]]

    def takes_s(count: int) -> float:
        done = set(slow[:count])
        rest_s = sum(load_s[i] for i in range(len(spans)) if i not in done)
        return max(rest_s, sum(compute_s[i] for i in done))

    best = min(range(len(slow) + 1), key=lambda count: (takes_s(count), count))
    return sorted(numbers[i] for i in slow[:best])


def shape_of(plan: Plan, selector: Selector) -> Shape:
    """How many tokens a plan fuses and computes."""
    fused, forced = len(plan.candidates), plan.forced.numel()
    if isinstance(selector, Nothing):
        fused = 0  # there are candidates, but no ratio selects among them
    if isinstance(selector, Everything):
        fused, forced = 0, forced + fused
    return Shape(fused, forced, plan.token_ids.numel(), selection_of(selector))


def selection_of(selector: Selector) -> Selection:
    """At which moment `selector` knows its tokens."""
    if isinstance(selector, AskingSelector):
        return Selection.ASKING
    return Selection.CHECKING if isinstance(selector, CheckingSelector) else Selection.STATIC


def subject_of(adapter: Adapter, identity: Identity) -> Subject:
    """The model and machine that a profile is saved for."""
    device = adapter.device
    return Subject(
        weights=identity.weights,
        architecture=identity.architecture,
        rope=identity.rope,
        dtype=identity.dtype,
        codec=identity.codec,
        machine=platform.node(),
        cpu=cpu_model(),
        threads=torch.get_num_threads(),
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        packed_bytes=adapter.packed_bytes,
    )


def _loads(spans: Sequence[Span]) -> list[Load]:
    return [
        Load(span.lease.kind.value, len(span), span.state is SpanState.FUSED, span.kind is not SpanKind.CHUNK)
        for span in spans
        if span.lease is not None
    ]


def _computing(plan: Plan, spans: Sequence[Span]) -> Plan:
    """`plan` with these spans computed instead of loaded."""
    if not spans:
        return plan
    changed = [
        replace(span, state=SpanState.COMPUTED, lease=None, offset=0) if span in spans else span for span in plan.spans
    ]
    return Plan.of(plan.token_ids, changed)
