"""Tiers hold entries: the contract of a tier and a lease, and the tiers on this machine (memory, disk)."""

from ..record import ALIGNMENT
from .base import Lease, RemoteStats, Speed, Tier, TierKind, TierStats, WrappedLease
from .disk import DiskTier, ReadOnlyDiskTier
from .memory import MemoryLease, MemoryTier
from .reading import aligned_empty

__all__ = [
    "ALIGNMENT",
    "DiskTier",
    "Lease",
    "MemoryLease",
    "MemoryTier",
    "ReadOnlyDiskTier",
    "RemoteStats",
    "Speed",
    "Tier",
    "TierKind",
    "TierStats",
    "WrappedLease",
    "aligned_empty",
]
