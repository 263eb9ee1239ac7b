"""Eviction policies of a live store: one contract and its implementations. Each is loaded at the
first use of its name.

`POLICIES` (`registry.py`) is their one table. Baselines of the papers, and policies that must know
the future, are in `benchmarks.simulate`.
"""

from pkgutil import resolve_name

from ragkv.config import at_least
from ragkv.errors import ConfigError
from ragkv.registry import POLICIES

from .base import Eviction, Item, Policy
from .inputs import NEVER, NextRequest, PolicySettings, TurnSize
from .lru import LRU


def make_policy(name: str, settings: PolicySettings | None = None) -> Policy:
    """A new policy by its name in `POLICIES`; raises `ConfigError` for an unknown name, and what
    `check_settings` raises.
    """
    check_settings(settings)
    if name not in POLICIES:
        raise ConfigError(
            f"A live store has no policy {name!r}. Known: {', '.join(sorted(POLICIES))}. "
            "`python -m benchmarks.simulate` has more: baselines, and policies that know the "
            "future."
        )
    made: Policy = resolve_name(POLICIES[name])(settings)
    return made


def check_settings(settings: PolicySettings | None) -> None:
    """Raise `ConfigError` for a setting below its least value."""
    if settings is not None:
        at_least(settings, xi_blocks=0, block_tokens=1, new_blocks=0)


__all__ = [
    "LRU",
    "NEVER",
    "Eviction",
    "Item",
    "NextRequest",
    "Policy",
    "PolicySettings",
    "TurnSize",
    "check_settings",
    "make_policy",
]
