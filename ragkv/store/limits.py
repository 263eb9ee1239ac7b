"""Limits what may stay in a tier: a rule keeps entries out of memory, documents take room on
the disk, and policies get a latency threshold.
"""

from dataclasses import dataclass

from .copying import MemoryRule, TierCopies
from .tiers import Tier


@dataclass(frozen=True, eq=False)
class StoreLimits:
    """Changes what the tiers of a store keep."""

    tiers: tuple[Tier, ...]  # fastest first
    copies: TierCopies  # between them

    def limit_memory(self, rule: MemoryRule) -> None:
        """From now on ask `rule` which entries, that a tier below has, are stored and copied
        up to memory. Those in memory that do not belong there leave it, as far as a disk has them.
        """
        self.copies.memory_rule = rule
        if (memory := self.copies.memory) is None:
            return
        local = [tier for tier in self.copies.below if not tier.is_remote]
        for info in memory.infos():
            is_below = any(tier.contains(info.key) for tier in local)
            if is_below and not self.copies.in_memory(info, 0, used=True):
                memory.delete(info.key)

    def retarget(self, xi_blocks: int) -> None:
        """Tell the policies of all tiers their latency threshold, in blocks."""
        for tier in self.tiers:
            if tier.ledger is not None:
                tier.ledger.notify_policy(lambda policy: policy.retarget(xi_blocks))

    def reserve_disk(self, size_bytes: int) -> None:
        """Reserve so many of `disk_bytes` for what lies next to the entries, such as documents."""
        for tier in self.tiers:
            tier.reserve(size_bytes)

    def free_disk(self) -> bool:
        """Give up entries on disk, because it is full; whether that freed any space."""
        freed = [tier.free_disk() for tier in self.tiers]
        return sum(freed) > 0
