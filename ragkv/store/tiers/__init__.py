"""Tiers hold entries: the contract of a tier and a lease, and the tiers on this machine (memory,
disk).
"""

from .base import Lease, RemoteStats, Tier, TierKind, TierStats
from .disk import DiskTier
from .memory import MemoryLease, MemoryTier
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
