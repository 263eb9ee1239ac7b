"""The door of the policies' room: a contract and its siblings, chosen by name."""

from ragkv.errors import ConfigError

from .auto import Auto
from .base import NEVER, Cut, Item, Next, Policy, PolicySettings, Turn
from .belady import Belady, TailBelady
from .et_lru import ETLRU, ETLRUPosterior
from .et_lru_learned import LearnedETLRU
from .fifo import FIFO
from .foresight import EndAware, LengthAware
from .gdsf import GDSF, LFUDA, GDSFMemory
from .lookahead import LookAhead
from .lru import LRU
from .t_lru import TLRU, TLRUAll, TLRUEager, TLRULiteral
from .t_lru_guarded import GuardedTLRU
from .threshold_lru import ThresholdLRU

POLICIES: dict[str, type[Policy]] = {
    policy.name: policy
    for policy in (
        FIFO,
        LRU,
        ThresholdLRU,
        LookAhead,
        TLRU,
        TLRUAll,
        TLRUEager,
        TLRULiteral,
        GuardedTLRU,
        ETLRU,
        ETLRUPosterior,
        LearnedETLRU,
        Auto,
        GDSF,
        LFUDA,
        GDSFMemory,
        EndAware,
        LengthAware,
        Belady,
        TailBelady,
    )
}


def make_policy(name: str, settings: PolicySettings | None = None, *, offline: bool = False) -> Policy:
    """A fresh policy by its registered name.

    Raises `ConfigError` for a name nobody has, and for a policy that must know the future unless `offline` says that
    somebody will tell it.
    """
    known = sorted(other for other, policy in POLICIES.items() if offline or not policy.offline)
    if name not in POLICIES:
        raise ConfigError(f"Unknown policy {name!r}. Known: {', '.join(known)}.")
    if POLICIES[name].offline and not offline:
        raise ConfigError(
            f"Policy {name!r} needs the future, which only the simulator knows. Take one of {', '.join(known)}."
        )
    return POLICIES[name](settings)


__all__ = [
    "Auto",
    "Belady",
    "Cut",
    "ETLRU",
    "ETLRUPosterior",
    "EndAware",
    "FIFO",
    "GDSF",
    "GuardedTLRU",
    "LFUDA",
    "GDSFMemory",
    "Item",
    "LRU",
    "LearnedETLRU",
    "LengthAware",
    "LookAhead",
    "NEVER",
    "Next",
    "POLICIES",
    "Policy",
    "PolicySettings",
    "TLRU",
    "TLRUAll",
    "TLRUEager",
    "TLRULiteral",
    "TailBelady",
    "ThresholdLRU",
    "Turn",
    "make_policy",
]
