"""The quality gate's result: the fastest setting that stays close to full recompute, and how it was
found.

`ragkv gate --apply` saves it next to the store, under the engine's identity and the settings that
it replaces. So another model never reads it, and an engine whose settings name another selector or
ratio keeps its own.
"""

import hashlib
import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from ragkv.config import FusionConfig
from ragkv.errors import ConfigError
from ragkv.fusion import make_selector
from ragkv.runtime import DAMAGED
from ragkv.store.entry import Identity

from .profile import read_measurements, save_measurement

if TYPE_CHECKING:
    from .method import Method

log = logging.getLogger(__name__)

FILE_NAME = "gate.json"


@dataclass(frozen=True, slots=True)
class Tolerance:
    """The distance from a full prefill that a fused prompt may have, as a mean over tokens."""

    # the share of equal predictions, of the tokens of which full prefill is sure
    agreement: float = 0.98
    kl: float = 0.05  # nats per token, full prefill against fused

    def __str__(self) -> str:
        return f"{100 * (1 - self.agreement):.3g} %"


@dataclass(frozen=True, slots=True)
class Point:
    """One setting with its measurements over prompts."""

    selector: str
    ratio: float
    kl: float  # nats per token, mean
    kl_bound: float  # its upper 95 % bound
    agreement: float  # mean
    agreement_bound: float  # its lower 95 % bound
    sooner: float  # how many times sooner the first token comes than by full recompute, median
    fused_s: float  # time to the first token, median
    full_s: float  # the same by full recompute of the same prompts, in the same minutes
    prompts: int

    def keeps(self, tolerance: Tolerance) -> bool:
        """Whether even the bounds are within `tolerance`."""
        return self.kl_bound <= tolerance.kl and self.agreement_bound >= tolerance.agreement

    def keeps_mean(self, tolerance: Tolerance) -> bool:
        """Whether the means are within `tolerance`."""
        return self.kl <= tolerance.kl and self.agreement >= tolerance.agreement

    @property
    def setting(self) -> str:
        """The setting in words."""
        return f"{self.selector} at {share(self.ratio)}"

    @property
    def agreed(self) -> str:
        """The agreement in words."""
        return f"agreement {share(self.agreement, 3)} (at least {share(self.agreement_bound, 3)})"


@dataclass(frozen=True, slots=True)
class GateResult:
    """All settings that were tried, and those that were measured again on other prompts."""

    tolerance: Tolerance
    points: tuple[Point, ...]
    # the fastest that kept the tolerance, on prompts that did not choose them
    confirmations: tuple[Point, ...]
    source: str  # what the prompts were made of
    machine: str
    left_out: int = 0  # prompts that are longer than the model's context

    @property
    def answer(self) -> Point | None:
        """The fastest setting that kept the tolerance twice; `None`: a full prefill is the
        fastest.
        """
        return next(
            (one for one in self.confirmations if one.keeps(self.tolerance) and one.sooner > 1.0),
            None,
        )

    def __str__(self) -> str:
        if (answer := self.answer) is not None:
            return (
                f"{answer.setting}: {answer.sooner:.1f}x sooner first token than full recompute, "
                f"{answer.agreed} on "
                f"{answer.prompts} prompts that did not choose it; nothing faster stays within "
                f"{self.tolerance}"
            )
        best = max(self.confirmations or self.points, key=lambda point: point.agreement_bound)
        if not any(point.keeps(self.tolerance) for point in self.points):
            why = f"no setting stays within {self.tolerance} of it on {best.prompts} prompts"
        elif not self.confirmations:
            why = f"no setting within {self.tolerance} of it is faster"
        else:
            why = (
                f"no faster setting stays within {self.tolerance} of it on {best.prompts} "
                "other prompts"
            )
        kl = f"KL {best.kl:.3f} (at most {best.kl_bound:.3f})"
        return (
            f"full recompute: {why}; the closest, {best.setting}: {best.agreed}, {kl}, "
            f"{best.sooner:.1f}x"
        )


def gated(
    method: "Method", result: GateResult, *, names_ratio: bool, names_selector: bool
) -> "Method":
    """What the gate's `result` makes of the method of a request. A ratio or a selector that the
    request names wins.
    """
    answer = result.answer
    if answer is None:
        if names_ratio or names_selector:
            return method
        return replace(
            method, reuse="none", ratio=0.0, controlled=False, notes=(f"quality gate: {result}",)
        )
    if names_selector and method.selector.name != answer.selector:
        return method
    if not names_selector:
        method = replace(method, selector=make_selector(answer.selector))
    if not names_ratio:
        method = replace(method, ratio=answer.ratio)
    taken = " and ".join(
        ([] if names_selector else [answer.selector])
        + ([] if names_ratio else [f"ratio {answer.ratio:g}"])
    )
    return replace(method, notes=(f"quality gate: {taken}",) if taken else ())


def candidates(points: Sequence[Point], tolerance: Tolerance) -> list[Point]:
    """The points that keep the tolerance, the fastest first.

    The means of all higher ratios of the same selector must keep it, too: below one that does not,
    a setting passes by chance.
    """
    found = list[Point]()
    failed = set[str]()
    for point in sorted(points, key=lambda one: -one.ratio):
        if not point.keeps_mean(tolerance):
            failed.add(point.selector)
        elif point.keeps(tolerance) and point.selector not in failed:
            found.append(point)
    return sorted(found, key=lambda point: -point.sooner)


def save(
    result: GateResult, directory: str | Path, identity: Identity, fusion: FusionConfig
) -> Path:
    """Save `result` in `directory` for engines of `identity` with these settings; returns the
    file's path.
    """
    return save_measurement(Path(directory) / FILE_NAME, _key(identity, fusion), asdict(result))


def load(directory: str | Path, identity: Identity, fusion: FusionConfig) -> GateResult | None:
    """The result that was applied to such an engine; `None` if there is none, or none that can be
    read.
    """
    try:
        found = read_measurements(Path(directory) / FILE_NAME).get(_key(identity, fusion))
        if found is None:
            return None
        points = {
            name: tuple(Point(**point) for point in found[name])
            for name in ("points", "confirmations")
        }
        for point in points["confirmations"]:
            make_selector(point.selector)  # it may be a caller's own, or one that is no more
        return GateResult(**{**found, "tolerance": Tolerance(**found["tolerance"]), **points})
    except (OSError, ConfigError, *DAMAGED) as error:
        log.warning(
            "The gate result in %s cannot be read (%s). Run `ragkv gate --apply` again.",
            directory,
            error,
        )
        return None


def _key(identity: Identity, fusion: FusionConfig) -> str:
    text = f"{identity.to_json()}|{fusion.selector}|{fusion.ratio}"
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def share(value: float, digits: int = 2) -> str:
    """A share as in ".10" and "1.00"."""
    return f"{value:.{digits}f}".removeprefix("0")
