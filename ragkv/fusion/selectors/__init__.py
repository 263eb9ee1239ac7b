"""The door of the selectors' room: siblings behind one contract, chosen by name."""

from ragkv.errors import ConfigError

from .base import CheckingSelector, Selector, StaticSelector, budget, top
from .hkvd import HKVD, GradualHKVD
from .static import Everything, FirstK, Nothing, Random

SELECTORS: dict[str, type[Selector]] = {
    selector.name: selector for selector in (HKVD, GradualHKVD, FirstK, Random, Nothing, Everything)
}


def make_selector(name: str) -> Selector:
    """A selector by its registered name; raises `ConfigError` naming the known ones."""
    if name not in SELECTORS:
        raise ConfigError(f"Unknown selector {name!r}. Known: {', '.join(sorted(SELECTORS))}.")
    return SELECTORS[name]()


__all__ = ["SELECTORS", "CheckingSelector", "Selector", "StaticSelector", "budget", "make_selector", "top"]
