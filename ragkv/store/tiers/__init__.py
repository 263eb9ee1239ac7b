"""Tiers hold entries: the contract of a tier and a lease, and the tiers on this machine (memory,
disk).
"""

from .base import Tier
from .disk import DiskTier
from .lease import Lease, StoredLease
from .memory import MemoryLease, MemoryTier
from .read_only import ReadOnlyDiskTier
from .stats import RemoteStats, StoreStats, TierKind, TierStats

__all__ = [
    "DiskTier",
    "Lease",
    "MemoryLease",
    "MemoryTier",
    "ReadOnlyDiskTier",
    "RemoteStats",
    "StoreStats",
    "StoredLease",
    "Tier",
    "TierKind",
    "TierStats",
]
