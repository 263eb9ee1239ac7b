"""Selectors: which tokens of a prompt are recomputed. All follow the contract in `base.py` and are chosen by name."""

from ragkv.errors import ConfigError

from ..plan import Candidates
from .base import (
    AskingSelector,
    CheckingSelector,
    Selector,
    StaticSelector,
    budget,
    raised_ratio,
    remaining_deviation,
    top,
    with_floor,
)
from .hkvd import HKVD, GradualHKVD
from .sensitivity import Attention, Sensitivity
from .static import Everything, FirstK, Nothing, Random

SELECTORS: dict[str, type[Selector]] = {
    selector.name: selector
    for selector in (Attention, HKVD, GradualHKVD, Sensitivity, FirstK, Random, Nothing, Everything)
}

UNSCORED = Attention.name  # The selector `UNSCORED` replaces one whose scores are missing.


def make_selector(name: str | Selector) -> Selector:
    """The selector of that name, or a given instance; raises `ConfigError` with the known names."""
    if isinstance(name, Selector):
        return name
    if name not in SELECTORS:
        raise ConfigError(f"Unknown selector {name!r}. Known: {', '.join(sorted(SELECTORS))}.")
    return SELECTORS[name]()


def usable(selector: Selector, candidates: Candidates, ratio: float) -> tuple[Selector, str | None]:
    """`selector`, or its replacement and the reason while some entries have no scores."""
    if not selector.needs_scores or candidates.sensitivity is not None or not budget(ratio, len(candidates)):
        return selector, None
    return SELECTORS[UNSCORED](), f"{selector.name}: some entries have no sensitivity scores yet; {UNSCORED} was used"


__all__ = [
    "SELECTORS",
    "AskingSelector",
    "CheckingSelector",
    "Selector",
    "StaticSelector",
    "budget",
    "make_selector",
    "raised_ratio",
    "remaining_deviation",
    "top",
    "usable",
    "with_floor",
]
