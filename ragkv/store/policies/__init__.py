"""Eviction policies of a live store: one contract, and its implementations chosen by name.

`POLICIES` has every policy that a live store may run. Policies that must know the future, and other readings of the
papers' algorithms, are in `ragkv.lab.simulate`.
"""

from ragkv.errors import ConfigError

from .auto import Auto
from .base import NEVER, Cut, Item, NextRequest, Policy, PolicySettings, Turn
from .departed import Departed
from .et_lru import ETLRU, ETLRUPosterior
from .et_lru_learned import LearnedETLRU
from .gdsf import GDSF, LFUDA, GDSFMemory
from .lookahead import LookAhead
from .lru import FIFO, LRU, ThresholdLRU
from .prefix_tier import OnEvict, PrefixTier
from .ranking import Ranking
from .t_lru import TLRU, EndAware, GuardedTLRU

_REGISTERED: tuple[type[Policy], ...] = (
    FIFO, LRU, ThresholdLRU, LookAhead, TLRU, GuardedTLRU, EndAware, ETLRU, ETLRUPosterior, LearnedETLRU, Auto,
    GDSF, LFUDA, GDSFMemory,
)  # fmt: skip
POLICIES: dict[str, type[Policy]] = {policy.name: policy for policy in _REGISTERED}


def make_policy(name: str, settings: PolicySettings | None = None) -> Policy:
    """A new policy by its registered name; raises `ConfigError` for an unknown name."""
    if name not in POLICIES:
        raise ConfigError(
            f"A live store has no policy {name!r}. Known: {', '.join(sorted(POLICIES))}. "
            "`ragkv simulate` has more: policies that know the future, and variants of T-LRU."
        )
    return POLICIES[name](settings)


__all__ = [
    "LRU",
    "NEVER",
    "POLICIES",
    "TLRU",
    "Cut",
    "Departed",
    "Item",
    "NextRequest",
    "OnEvict",
    "Policy",
    "PolicySettings",
    "PrefixTier",
    "Ranking",
    "Turn",
    "make_policy",
]
