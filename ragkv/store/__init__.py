"""The store's door: where entries live. It knows no transformers.

An `Entry` is one run of tokens' KV without positions, proven by its `Identity`; a `Store` is a stack of tiers that
keeps entries and leases them out for reading.
"""

from .entry import (
    FORMAT_VERSION,
    Entry,
    EntryInfo,
    Identity,
    dtype_from_name,
    dtype_name,
    ids_bytes,
    ids_digest,
)
from .policies import LRU, POLICIES, Item, Policy, Turn, make_policy
from .store import Store, StoreStats
from .tiers import DiskTier, Lease, MemoryTier, ReadOnlyDiskTier, Tier, TierKind, TierStats, aligned_empty

__all__ = [
    "DiskTier",
    "Entry",
    "EntryInfo",
    "FORMAT_VERSION",
    "Identity",
    "Item",
    "LRU",
    "Lease",
    "MemoryTier",
    "POLICIES",
    "Policy",
    "ReadOnlyDiskTier",
    "Store",
    "StoreStats",
    "Tier",
    "TierKind",
    "TierStats",
    "Turn",
    "aligned_empty",
    "dtype_from_name",
    "dtype_name",
    "ids_bytes",
    "ids_digest",
    "make_policy",
]
