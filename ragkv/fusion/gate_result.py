"""The quality gate's result: the fastest setting that stays close to full recompute, and how it was found.

`ragkv gate --apply` saves it next to the store, under the engine's identity (weights, RoPE, dtype, prefix, ...) and the
settings that it stands in for, so another model never reads it, and an engine whose settings name another selector or
ratio keeps its own.
"""

import hashlib
import logging
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from statistics import median
from typing import Any, Self

from ragkv.config import FusionConfig
from ragkv.store import Identity

from .profile import read_measurements, save_measurement

log = logging.getLogger(__name__)

FILE_NAME = "gate.json"
SURE = math.log(2)  # A full recompute is sure of a token whose logit is `SURE` above the next: twice as likely.
IN_WORDS = {"score": "passages best first", "document": "passages in the order of the documents"}


@dataclass(frozen=True, slots=True)
class Tolerance:
    """How far a fused prompt may be from a full prefill, on average over the next tokens."""

    agreement: float = 0.98  # share of equal predictions, among tokens of which the full prefill is sure
    kl: float = 0.05  # nats per token, full prefill against fused

    def __str__(self) -> str:
        return f"{100 * (1 - self.agreement):.3g} %"


@dataclass(frozen=True, slots=True)
class SpeedUp:
    """Times to the first token, fused against full recompute of the same prompts in the same minutes."""

    times: float  # how many times sooner: full over fused, the median over prompts
    low: float  # its 95 % interval
    high: float
    fused_s: float  # medians over prompts
    full_s: float

    @classmethod
    def of(cls, fused_s: Sequence[float], full_s: Sequence[float]) -> Self:
        """From one time of each kind a prompt."""
        gains = [full / fused for fused, full in zip(fused_s, full_s, strict=True)]
        return cls(median(gains), *median_interval(gains), median(fused_s), median(full_s))


@dataclass(frozen=True, slots=True)
class Point:
    """One setting and what was measured of it."""

    selector: str
    ratio: float
    order: str | None  # of the passages; None: prompts were not made by retrieval
    kl: float  # nats per token, mean over prompts
    kl_bound: float  # its upper 95 % bound
    agreement: float  # mean over prompts
    agreement_bound: float  # its lower 95 % bound
    remaining_deviation: float | None  # per token, the maximum over prompts, for the guard; None without scores
    speed: SpeedUp
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
        order = "" if self.order is None else f", {IN_WORDS.get(self.order, f'passages in the order {self.order!r}')}"
        return f"{self.selector} at {share(self.ratio)}{order}"

    @property
    def agreed(self) -> str:
        """The agreement in words."""
        return f"agreement {share(self.agreement, 3)} (at least {share(self.agreement_bound, 3)})"

    @property
    def is_setting_of(self) -> tuple[str, float, str | None]:
        """What distinguishes it from other points."""
        return self.selector, self.ratio, self.order


@dataclass(frozen=True, slots=True)
class GateResult:
    """All settings that were tried, and those that were measured again on other prompts."""

    tolerance: Tolerance
    points: tuple[Point, ...]
    confirmations: tuple[Point, ...]  # the fastest that kept the tolerance, on prompts that did not choose them
    source: str  # what the prompts were made of
    tokens: int  # next tokens compared, over all prompts
    machine: str
    left_out: int = 0  # prompts that are longer than the model's context

    @property
    def answer(self) -> Point | None:
        """The fastest setting that kept the tolerance twice; `None`: a full prefill is the fastest."""
        return next((point for point in self.confirmations if _is_answer(point, self.tolerance)), None)

    def outcome(self, point: Point) -> str:
        """What was found of one of `points`: "answer", "yes", "no", "by chance", or "not again" on other prompts."""
        if not point.keeps(self.tolerance):
            return "no"
        again = [other for other in self.confirmations if other.is_setting_of == point.is_setting_of]
        if again:
            return "answer" if again[0] is self.answer else "not again"
        return "yes" if point in candidates(self.points, self.tolerance, gain=0.0) else "by chance"

    def __str__(self) -> str:
        if (answer := self.answer) is not None:
            speed = answer.speed
            return (
                f"{answer.setting}: {speed.times:.1f}x sooner first token than full recompute ({speed.low:.1f} to "
                f"{speed.high:.1f}), {answer.agreed} on {answer.prompts} prompts that did not choose it; nothing "
                f"faster stays within {self.tolerance}"
            )
        best = max(self.points, key=lambda point: point.agreement_bound)
        if not any(point.keeps(self.tolerance) for point in self.points):
            why = f"no setting stays within {self.tolerance} of it on {best.prompts} prompts"
        elif not self.confirmations:
            why = f"no setting within {self.tolerance} of it is faster"
        else:
            best = max(self.confirmations, key=lambda point: point.agreement_bound)
            why = f"no faster setting stays within {self.tolerance} of it on {best.prompts} other prompts"
        return (
            f"full recompute: {why}; the closest, {best.setting}: {best.agreed}, KL {best.kl:.3f} (at most "
            f"{best.kl_bound:.3f}), {best.speed.times:.1f}x"
        )


def candidates(points: Sequence[Point], tolerance: Tolerance, gain: float = 1.0) -> list[Point]:
    """The points that keep the tolerance and are more than `gain` times as fast as full recompute, the fastest first.

    The means of all higher ratios of the same selector and order must keep it, too: below one that does not, a setting
    passes by chance.
    """

    def kind(point: Point) -> tuple[str, str]:
        return point.selector, point.order or ""

    found: list[Point] = []
    for _, group in groupby(sorted(points, key=lambda point: (*kind(point), -point.ratio)), kind):
        for point in group:
            if not point.keeps_mean(tolerance):
                break
            if point.keeps(tolerance):
                found.append(point)
    return sorted((point for point in found if point.speed.times > gain), key=lambda point: -point.speed.times)


def save(result: GateResult, directory: str | Path, identity: Identity, fusion: FusionConfig) -> Path:
    """Save `result` in `directory` for engines of `identity` with these settings; returns the file's path."""
    return save_measurement(Path(directory) / FILE_NAME, _key(identity, fusion), asdict(result))


def load(directory: str | Path, identity: Identity, fusion: FusionConfig) -> GateResult | None:
    """The result that was applied to such an engine; `None` if there is none, or none that can be read."""
    try:
        found = read_measurements(Path(directory) / FILE_NAME).get(_key(identity, fusion))
        return None if found is None else _read(found)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        log.warning("The gate result in %s cannot be read (%s). Run `ragkv gate --apply` again.", directory, error)
        return None


def _read(found: dict[str, Any]) -> GateResult:
    def points(values: Sequence[dict[str, Any]]) -> tuple[Point, ...]:
        return tuple(Point(**{**value, "speed": SpeedUp(**value["speed"])}) for value in values)

    return GateResult(
        **{
            **found,
            "tolerance": Tolerance(**found["tolerance"]),
            "points": points(found["points"]),
            "confirmations": points(found["confirmations"]),
        }
    )


def _key(identity: Identity, fusion: FusionConfig) -> str:
    text = f"{identity.to_json()}|{fusion.selector}|{fusion.ratio}"
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _is_answer(point: Point, tolerance: Tolerance) -> bool:
    return point.keeps(tolerance) and point.speed.times > 1.0


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """The 95 % interval of a median, whatever the distribution; of fewer than six values their range."""
    ordered, count = sorted(values), len(values)
    out, below = 0, 0.0  # `out` values may be left out at each end: a binomial tail of 2.5 %
    while out < count and below + math.comb(count, out) / 2**count <= 0.025:
        below += math.comb(count, out) / 2**count
        out += 1
    out = max(0, out - 1)
    return ordered[out], ordered[-1 - out]


def share(value: float, digits: int = 2) -> str:
    """A share as in ".10" and "1.00"."""
    return f"{value:.{digits}f}".removeprefix("0")
