"""Tiers hold entries: the contract of a tier and a lease, and the tiers on this machine (memory,
disk).
"""

from .base import RemoteStats, Tier, TierStats
from .disk import DiskTier
from .lease import Lease, MemoryLease, TierKind
from .memory import MemoryTier
from .read_only import ReadOnlyDiskTier

__all__ = [
    "DiskTier",
    "Lease",
    "MemoryLease",
    "MemoryTier",
    "ReadOnlyDiskTier",
    "RemoteStats",
    "Tier",
    "TierKind",
    "TierStats",
]
