"""What the quality gate found out about an engine, kept beside its store: the ratio from which fusion is good enough.

A verdict is filed under the engine's identity (weights, RoPE, dtype, prefix, ...) and selector, so that another model
in the same directory never goes by it. Pure Python.
"""

import hashlib
import json
import logging
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from ragkv.store import Identity

log = logging.getLogger(__name__)

FILE_NAME = "gate.json"
WORTHWHILE = 0.5  # a ratio above it saves too little to be called fusion


@dataclass(frozen=True, slots=True)
class Tolerance:
    """How far a fused prompt may be from a full prefill, on average over the next tokens."""

    kl: float = 0.05  # nats a token, full prefill against fused
    agreement: float = 0.95  # share of tokens foretold alike, of those of which full prefill is sure


@dataclass(frozen=True, slots=True)
class Point:
    """What was measured at one ratio."""

    ratio: float
    kl: float  # nats a token, the mean over contexts
    kl_bound: float  # its upper 95 % bound
    agreement: float  # the mean over contexts
    agreement_bound: float  # its lower 95 % bound
    remaining_deviation: (
        float | None
    )  # most expected deviation left a token in any context, for the guard; None without scores

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
    tokens: int  # next tokens compared, over all of them

    @property
    def ratio(self) -> float | None:
        """r*: the least measured ratio from which on the tolerance is kept; `None` if there is none worth it."""
        kept = None
        for point in reversed(self.points):
            if not point.keeps(self.tolerance):
                break
            kept = point.ratio
        return None if kept is None or kept > WORTHWHILE else kept

    @property
    def remaining_deviation(self) -> float | None:
        """The expected deviation left at r*."""
        return next((point.remaining_deviation for point in self.points if point.ratio == self.ratio), None)

    def __str__(self) -> str:
        limits = f"KL {self.tolerance.kl} and agreement {self.tolerance.agreement}"
        if self.ratio is None:
            return f"refused: {self.selector} keeps {limits} at no ratio up to {WORTHWHILE}; a full prefill is used"
        return f"passed: {self.selector} keeps {limits} from ratio {self.ratio} on"


def save(verdict: GateResult, directory: str | Path, identity: Identity) -> Path:
    """File `verdict` under `identity` in `directory`, in place of an earlier one; the file's path."""
    path = Path(directory) / FILE_NAME
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    filed = _read(path)
    filed[_key(identity, verdict.selector)] = asdict(verdict)
    draft = path.with_suffix(f".{os.getpid()}.tmp")
    draft.write_text(json.dumps(filed, indent=1) + "\n", encoding="utf-8")
    draft.replace(path)
    return path


def load(directory: str | Path, identity: Identity, selector: str) -> GateResult | None:
    """The verdict on that engine, or `None` if the gate was never run on it."""
    found = _read(Path(directory) / FILE_NAME).get(_key(identity, selector))
    if found is None:
        return None
    try:
        points = tuple(Point(**point) for point in found["points"])
        return GateResult(**{**found, "tolerance": Tolerance(**found["tolerance"]), "points": points})
    except (KeyError, TypeError) as error:
        log.warning("The gate's verdict in %s is not readable (%s); run the gate again.", directory, error)
        return None


def _key(identity: Identity, selector: str) -> str:
    return hashlib.blake2b(f"{identity.to_json()}|{selector}".encode(), digest_size=16).hexdigest()


def _read(path: Path) -> dict[str, dict]:  # type: ignore[type-arg]
    try:
        filed = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        log.warning("The gate's verdicts in %s are not readable (%s); run the gate again.", path, error)
        return {}
    return filed if isinstance(filed, dict) else {}
