"""The loading controller at work: from a request's plan to what it loads, and back with the decision (CacheBlend 5.2).

Holds the profile an engine goes by, or why there is none: a request is then served at r*, and its report says so. An
error of the controller is never an error of a request.
"""

import platform
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from .config import PricesConfig
from .errors import ProfileError, RagKVError
from .fusion import AskingSelector, CheckingSelector, Plan, Selector, Span, SpanKind, SpanState, make_selector
from .fusion.controller import decide
from .fusion.estimators import Load, Selection, Shape
from .fusion.profile import Profile, Subject, cpu_model, load
from .fusion.selectors.static import Everything, Nothing
from .model import Adapter
from .store import Identity
from .types import Reuse


@dataclass(frozen=True, slots=True)
class Controlled:
    """A request after the controller saw it."""

    plan: Plan
    ratio: float
    why: tuple[str, ...] = ()  # the decision in words; empty if there was none
    note: str | None = None  # why there was none


class Control:
    """The profile in force. Holds no request's state."""

    def __init__(self, subject: Subject, directory: str | Path | None, prices: PricesConfig) -> None:
        """Go by the profile filed in `directory`, if there is one of `subject`."""
        self.subject, self.prices = subject, prices
        self._profile: Profile | ProfileError
        try:
            if directory is None:
                raise ProfileError("The engine has no store directory, so no profile was filed for it.")
            self._profile = load(directory, subject)
        except ProfileError as error:
            self._profile = error

    @property
    def profile(self) -> Profile:
        """The profile in force; raises `ProfileError` saying why there is none."""
        if isinstance(self._profile, ProfileError):
            raise self._profile
        return self._profile

    def heed(self, profile: Profile) -> None:
        """Go by `profile` from now on; raises `ProfileError` if it is of another model or machine."""
        profile.check(self.subject)
        self._profile = profile

    def seen(self, reuse: Reuse) -> tuple[Shape, list[Load]]:
        """Of a request that was served: its shape, and what it read, one load a tier. Raises `ProfileError`."""
        selector = make_selector(reuse.selector)
        shape = _shape(reuse.fused + reuse.recomputed, reuse.computed, reuse.tokens, selector)
        a_token = self.profile.stored_bytes_per_token
        return shape, [Load(tier, round(size / a_token)) for tier, size in reuse.bytes_by_tier.items()]

    def decide(self, plan: Plan, selector: Selector, r_star: float) -> Controlled:
        """What to compute rather than load, and the ratio. Without a profile `plan` as it is, at `r_star`."""
        found = self._profile
        if isinstance(found, ProfileError):
            return Controlled(plan, r_star, note=f"controller: ratio {r_star:g} was used. {found}")
        spans = [span for span in plan.loaded() if span.kind is not SpanKind.PREFIX]  # which the engine itself holds
        try:
            decision = decide(found, shape_of(plan, selector), _loads(spans), r_star, self.prices)
        except RagKVError as error:  # a tier that was not measured
            return Controlled(plan, r_star, note=f"controller: ratio {r_star:g} was used. {error}")
        return Controlled(_computing(plan, [spans[i] for i in decision.computed]), decision.ratio, decision.why)


def shape_of(plan: Plan, selector: Selector) -> Shape:
    """What a plan asks of the model."""
    return _shape(len(plan.candidates), plan.forced.numel(), plan.token_ids.numel(), selector)


def _shape(fused: int, forced: int, length: int, selector: Selector) -> Shape:
    if isinstance(selector, Nothing):
        fused = 0  # there are candidates, but no ratio chooses among them
    if isinstance(selector, Everything):
        fused, forced = 0, forced + fused
    return Shape(fused, forced, length, selection_of(selector))


def selection_of(selector: Selector) -> Selection:
    """When `selector` knows its tokens."""
    if isinstance(selector, AskingSelector):
        return Selection.ASKING
    return Selection.CHECKING if isinstance(selector, CheckingSelector) else Selection.STATIC


def subject_of(adapter: Adapter, identity: Identity) -> Subject:
    """What a profile of this model, here, is filed under."""
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
