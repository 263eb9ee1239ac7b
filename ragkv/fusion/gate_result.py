"""The result of the quality gate, saved next to the store: the lowest ratio at which fusion is good enough.

A result is saved under the engine's identity (weights, RoPE, dtype, prefix, ...) and selector, so another model that
uses the same directory never reads it.
"""

import hashlib
import logging
from dataclasses import asdict, dataclass
from pathlib import Path

from ragkv.store import Identity

from . import json_file

log = logging.getLogger(__name__)

FILE_NAME = "gate.json"
WORTHWHILE = 0.5  # a higher ratio saves too little to be worth fusing
RENAMED = {"left": "remaining_deviation"}  # fields of points in files of earlier versions


@dataclass(frozen=True, slots=True)
class Tolerance:
    """How far a fused prompt may be from a full prefill, on average over the next tokens."""

    kl: float = 0.05  # nats per token, full prefill against fused
    agreement: float = 0.95  # share of equal predictions, among tokens of which the full prefill is sure


@dataclass(frozen=True, slots=True)
class Point:
    """The measurements at one ratio."""

    ratio: float
    kl: float  # nats per token, mean over contexts
    kl_bound: float  # its upper 95 % bound
    agreement: float  # mean over contexts
    agreement_bound: float  # its lower 95 % bound
    remaining_deviation: float | None  # per token, the maximum over contexts, for the guard; None without scores

    def keeps(self, tolerance: Tolerance) -> bool:
        """Whether even the bounds are within `tolerance`."""
        return self.kl_bound <= tolerance.kl and self.agreement_bound >= tolerance.agreement


@dataclass(frozen=True, slots=True)
class GateResult:
    """Whether fusion may be used, and from which ratio on."""

    selector: str
    tolerance: Tolerance
    points: tuple[Point, ...]  # by ascending ratio
    contexts: int  # prompts compared
    tokens: int  # next tokens compared, over all prompts

    @property
    def ratio(self) -> float | None:
        """r*: the lowest ratio from which on every point keeps the tolerance; `None` if it exceeds `WORTHWHILE`."""
        lowest = None
        for point in reversed(self.points):
            if not point.keeps(self.tolerance):
                break
            lowest = point.ratio
        return None if lowest is None or lowest > WORTHWHILE else lowest

    @property
    def remaining_deviation(self) -> float | None:
        """The expected remaining deviation at r*."""
        return next((point.remaining_deviation for point in self.points if point.ratio == self.ratio), None)

    def __str__(self) -> str:
        limits = f"KL {self.tolerance.kl} and agreement {self.tolerance.agreement}"
        if self.ratio is None:
            return f"refused: {self.selector} keeps {limits} at no ratio up to {WORTHWHILE}; a full prefill is used"
        return f"passed: {self.selector} keeps {limits} from ratio {self.ratio} on"


def save(result: GateResult, directory: str | Path, identity: Identity) -> Path:
    """Save `result` under `identity` in `directory`, replacing an earlier one; returns the file's path."""
    return json_file.save(Path(directory) / FILE_NAME, _key(identity, result.selector), asdict(result))


def load(directory: str | Path, identity: Identity, selector: str) -> GateResult | None:
    """The saved result of that engine; `None` if the gate never ran on it or the file cannot be read."""
    try:
        found = json_file.read(Path(directory) / FILE_NAME).get(_key(identity, selector))
        if found is None:
            return None
        points = tuple(
            Point(**{RENAMED.get(name, name): value for name, value in point.items()}) for point in found["points"]
        )
        return GateResult(**{**found, "tolerance": Tolerance(**found["tolerance"]), "points": points})
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        log.warning("The gate result in %s cannot be read (%s). Run the gate again.", directory, error)
        return None


def _key(identity: Identity, selector: str) -> str:
    return hashlib.blake2b(f"{identity.to_json()}|{selector}".encode(), digest_size=16).hexdigest()
