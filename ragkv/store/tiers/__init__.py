"""The door of the tiers' room: a contract and its siblings."""

from ..record import ALIGNMENT
from .base import Lease, RemoteStats, Speed, Tier, TierKind, TierStats
from .disk import DiskTier
from .disk_file import aligned_empty
from .disk_readonly import ReadOnlyDiskTier
from .memory import MemoryTier

__all__ = [
    "ALIGNMENT",
    "DiskTier",
    "Lease",
    "MemoryTier",
    "ReadOnlyDiskTier",
    "RemoteStats",
    "Speed",
    "Tier",
    "TierKind",
    "TierStats",
    "aligned_empty",
]
