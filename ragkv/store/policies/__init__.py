"""Eviction policies of a live store: one contract, and its implementations chosen by name.

`POLICIES` has every policy that a live store may run. Baselines of the papers, and policies that must know the future,
are in `ragkv.lab.simulate`.
"""

from ragkv.errors import ConfigError

from .auto import AutomaticTLRU
from .base import NEVER, Cut, Item, NextRequest, Policy, PolicySettings, TurnSize
from .et_lru import ETLRU
from .groups import Departed, Ranking
from .lookahead import LookAhead
from .lru import LRU, ThresholdLRU
from .prefix_tier import OnEvict, PrefixTier
from .t_lru import TLRU, GuardedTLRU

_REGISTERED: tuple[type[Policy], ...] = (LRU, ThresholdLRU, LookAhead, AutomaticTLRU, ETLRU)
POLICIES: dict[str, type[Policy]] = {policy.name: policy for policy in _REGISTERED}


def make_policy(name: str, settings: PolicySettings | None = None) -> Policy:
    """A new policy by its registered name; raises `ConfigError` for an unknown name."""
    if name not in POLICIES:
        raise ConfigError(
            f"A live store has no policy {name!r}. Known: {', '.join(sorted(POLICIES))}. "
            "`ragkv simulate` has more: baselines, and policies that know the future."
        )
    return POLICIES[name](settings)


__all__ = [
    "LRU",
    "NEVER",
    "POLICIES",
    "TLRU",
    "Cut",
    "Departed",
    "GuardedTLRU",
    "Item",
    "NextRequest",
    "OnEvict",
    "Policy",
    "PolicySettings",
    "PrefixTier",
    "Ranking",
    "TurnSize",
    "make_policy",
]
