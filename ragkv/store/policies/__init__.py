"""Eviction policies of a live store: one contract, and its implementations, each loaded with the
first use of its name.

`POLICIES` has every policy that a live store may run. Baselines of the papers, and policies that
must know the future, are in `benchmarks.simulate`.
"""

import importlib

from ragkv.errors import ConfigError

from .base import Cut, Item, Policy
from .inputs import NEVER, NextRequest, PolicySettings, TurnSize
from .lru import LRU

# The file and the class of each.
POLICIES = {
    "et-lru": ("et_lru", "ETLRU"),
    "lookahead": ("lru", "LookAhead"),
    "lru": ("lru", "LRU"),
    "t-lru": ("t_lru", "TLRU"),
    "t-lru-guarded": ("t_lru", "GuardedTLRU"),
    "threshold-lru": ("threshold_lru", "ThresholdLRU"),
}


def policy_class(name: str) -> type[Policy]:
    """The class of a policy by its registered name; raises `ConfigError` for an unknown name."""
    if name not in POLICIES:
        raise ConfigError(
            f"A live store has no policy {name!r}. Known: {', '.join(sorted(POLICIES))}. "
            "`python -m benchmarks.simulate` has more: baselines, and policies that know the "
            "future."
        )
    file, class_name = POLICIES[name]
    found: type[Policy] = getattr(importlib.import_module(f".{file}", __name__), class_name)
    return found


def make_policy(name: str, settings: PolicySettings | None = None) -> Policy:
    """A new policy by its registered name; raises `ConfigError` for an unknown name."""
    return policy_class(name)(settings)


__all__ = [
    "LRU",
    "NEVER",
    "POLICIES",
    "Cut",
    "Item",
    "NextRequest",
    "Policy",
    "PolicySettings",
    "TurnSize",
    "make_policy",
    "policy_class",
]
