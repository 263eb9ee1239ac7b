"""Applies the loading controller to a request's plan: which chunks to load, and the ratio (CacheBlend section 5.2).

Holds the engine's profile, which is read when a request first leaves its ratio to the controller. Without a profile a
request is served at r*, and its report says why. An error of the controller never fails a request. A chunk that would
load from shared storage slower than it is computed is computed, also when the caller gave the ratio: there the speed of
the store's latest reads counts, not the speed when the profile was made.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ragkv.config import PricesConfig
from ragkv.errors import ProfileError, RagKVError
from ragkv.fusion import AskingSelector, CheckingSelector, Plan, Selector, Span, SpanKind, SpanState
from ragkv.model import Adapter
from ragkv.runtime import cpu_model
from ragkv.store import Identity

if TYPE_CHECKING:
    from ragkv.fusion.estimators import Shape
    from ragkv.fusion.profile import Profile, Subject


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
        adapter: Adapter,
        identity: Identity,
        directory: str | Path | None,
        prices: PricesConfig,
        speeds: Callable[[], Mapping[str, float]] = dict,
    ) -> None:
        """Use the profile of this model, and of entries of `identity`, that is saved in `directory`, if there is one.

        `speeds` gives those of remote tiers.
        """
        self._adapter, self._identity, self._directory = adapter, identity, directory
        self.prices, self._speeds = prices, speeds
        self._profile: Profile | None = None

    @cached_property
    def subject(self) -> "Subject":
        """The model and machine that a profile is saved for."""
        import platform

        from ragkv.fusion.profile import Subject

        adapter, identity, device = self._adapter, self._identity, self._adapter.device
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

    @property
    def profile(self) -> "Profile":
        """The profile in use. Raises `ProfileError`, which says why there is none."""
        if self._profile is None:
            from ragkv.fusion.profile import load

            if self._directory is None:
                raise ProfileError("The engine has no store directory, so no profile was saved for it.")
            self._profile = load(self._directory, self.subject)
        return self._profile

    def apply_profile(self, profile: "Profile") -> None:
        """Use `profile` from now on. Raises `ProfileError` if it is of another model or machine."""
        profile.check(self.subject)
        self._profile = profile

    def decide(self, plan: Plan, selector: Selector, r_star: float) -> Controlled:
        """Choose the ratio and the spans to compute instead of load. Without a profile: no spans, and `r_star`."""
        from ragkv.fusion.controller import decide
        from ragkv.fusion.estimators import Load
        from ragkv.fusion.profile import TierSpeed

        spans = [span for span in plan.loaded() if span.kind is not SpanKind.PREFIX]  # the engine holds it
        loads = [
            Load(span.lease.kind.value, len(span), span.state is SpanState.FUSED, span.kind is not SpanKind.CHUNK)
            for span in spans
            if span.lease is not None
        ]
        # The present speeds of remote tiers include round trips, so a slice adds no latency.
        now = {kind: TierSpeed(0.0, 1.0 / speed) for kind, speed in self._speeds().items()}
        try:
            profile = replace(self.profile, tiers={**self.profile.tiers, **now})
            decision = decide(profile, _shape(plan, selector), loads, r_star, self.prices)
        except RagKVError as error:  # there is no profile, or a tier was not measured
            return Controlled(plan, r_star, note=f"controller: ratio {r_star:g} was used. {error}")
        return Controlled(_computing(plan, [spans[i] for i in decision.computed]), decision.ratio, decision.why)

    def shed_loads(self, plan: Plan, ratio: float, row_s: float | None) -> Controlled:
        """At a given ratio, compute the chunks that would load from shared storage slower than they are computed.

        `row_s` are the seconds of a row in all layers, measured lately; `None`: nothing was, and all are loaded.
        """
        speeds, remote = self._speeds(), list[tuple[Span, float, str]]()  # with the seconds to load it, and its tier
        for span in plan.loaded():
            if span.lease is not None and span.kind is SpanKind.CHUNK and (tier := span.lease.kind.value) in speeds:
                remote.append((span, span.lease.stored_bytes / speeds[tier], tier))
        if not remote or row_s is None:
            return Controlled(plan, ratio)
        slow = [(span, load_s, tier) for span, load_s, tier in remote if load_s > len(span) * row_s]
        slow.sort(key=lambda one: len(one[0]) * row_s - one[1])  # the largest gain first

        def takes_s(count: int) -> float:
            """Seconds until all are there, if the first `count` are computed while the others load."""
            loading_s = sum(load_s for _, load_s, _ in remote) - sum(load_s for _, load_s, _ in slow[:count])
            return max(loading_s, sum(len(span) * row_s for span, _, _ in slow[:count]))

        computed = slow[: min(range(len(slow) + 1), key=lambda count: (takes_s(count), count))]
        if not computed:
            return Controlled(plan, ratio)
        tiers = sorted({tier for _, _, tier in computed})
        rates = ", ".join(f"{tier} {speeds[tier] / 1e6:.3g} MB/s" for tier in tiers)
        note = f"{len(computed)} of {len(remote)} chunks were computed, which is quicker than loading them ({rates})"
        return Controlled(_computing(plan, [span for span, _, _ in computed]), ratio, note=note)


def _shape(plan: Plan, selector: Selector) -> "Shape":
    """How many tokens of a prompt are fused and computed, and when `selector` knows its tokens."""
    from ragkv.fusion.estimators import Selection, Shape

    fused, forced = len(plan.candidates), plan.forced.numel()
    if not selector.uses_ratio:  # it selects none of the candidates, or all
        fused, forced = 0, forced + (fused if selector.name == "all" else 0)
    asking, checking = isinstance(selector, AskingSelector), isinstance(selector, CheckingSelector)
    when = Selection.ASKING if asking else Selection.CHECKING if checking else Selection.STATIC
    return Shape(fused, forced, plan.token_ids.numel(), when)


def _computing(plan: Plan, spans: Sequence[Span]) -> Plan:
    """`plan` with these spans computed instead of loaded."""
    if not spans:
        return plan
    changed = [
        replace(span, state=SpanState.COMPUTED, lease=None, offset=0) if span in spans else span for span in plan.spans
    ]
    return Plan.of(plan.token_ids, changed)
