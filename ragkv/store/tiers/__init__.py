"""The door of the tiers' room: a contract and its siblings."""

from .base import Lease, Tier, TierKind, TierStats
from .disk import DiskTier
from .disk_file import aligned_empty
from .disk_readonly import ReadOnlyDiskTier
from .memory import MemoryTier

__all__ = [
    "DiskTier",
    "Lease",
    "MemoryTier",
    "ReadOnlyDiskTier",
    "Tier",
    "TierKind",
    "TierStats",
    "aligned_empty",
]
