"""The door of the selectors' room: siblings behind one contract, chosen by name."""

from ragkv.errors import ConfigError

from ..plan import Candidates
from .base import AskingSelector, CheckingSelector, Selector, StaticSelector, budget, top
from .hkvd import HKVD, GradualHKVD
from .sensitivity import QuerySensitivity, Sensitivity
from .static import Everything, FirstK, Nothing, Random

SELECTORS: dict[str, type[Selector]] = {
    selector.name: selector
    for selector in (HKVD, GradualHKVD, Sensitivity, QuerySensitivity, FirstK, Random, Nothing, Everything)
}


UNSCORED = GradualHKVD.name  # stands in for a selector whose scores are missing


def make_selector(name: str | Selector) -> Selector:
    """A selector by its registered name, or one that was made; raises `ConfigError` naming the known ones."""
    if isinstance(name, Selector):
        return name
    if name not in SELECTORS:
        raise ConfigError(f"Unknown selector {name!r}. Known: {', '.join(sorted(SELECTORS))}.")
    return SELECTORS[name]()


def usable(selector: Selector, candidates: Candidates, ratio: float) -> tuple[Selector, str | None]:
    """`selector`, or what stands in for it while some entries have no scores, and then the reason."""
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
    "top",
    "usable",
]
