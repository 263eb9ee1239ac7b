"""The door of the policies' room: a contract and its siblings, chosen by name."""

from ragkv.errors import ConfigError

from .base import Item, Policy
from .lru import LRU

POLICIES: dict[str, type[Policy]] = {policy.name: policy for policy in (LRU,)}


def make_policy(name: str) -> Policy:
    """A fresh policy by its registered name; raises `ConfigError` naming the known ones."""
    if name not in POLICIES:
        raise ConfigError(f"Unknown policy {name!r}. Known: {', '.join(sorted(POLICIES))}.")
    return POLICIES[name]()


__all__ = ["LRU", "POLICIES", "Item", "Policy", "make_policy"]
