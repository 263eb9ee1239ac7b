"""The store's door: where entries live. It knows no transformers.

An `Entry` is one run of tokens' KV without positions, proven by its `Identity`; a `Store` is a stack of tiers that
keeps entries and leases them out for reading. Policies know no torch, so torch loads with the first name that needs it.
"""

import importlib
from typing import TYPE_CHECKING, Any

from .policies import LRU, POLICIES, Item, Policy, Turn, make_policy

if TYPE_CHECKING:
    from .background import Background, Job
    from .codecs import CODECS, Codec
    from .encoded import EncodedEntry
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
    from .prefetch_hint import HintedEntry, PrefetchHint
    from .store import Claim, Store, StoreStats
    from .tiers import (
        ALIGNMENT,
        DiskTier,
        Lease,
        MemoryTier,
        ReadOnlyDiskTier,
        RemoteStats,
        Speed,
        Tier,
        TierKind,
        TierStats,
        aligned_empty,
    )

_ROOMS = (".background", ".codecs", ".prefetch_hint", ".encoded", ".entry", ".store", ".tiers")


def __getattr__(name: str) -> Any:
    if name in __all__:
        for room in _ROOMS:
            module = importlib.import_module(room, __name__)
            if hasattr(module, name):
                return getattr(module, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "ALIGNMENT",
    "Background",
    "CODECS",
    "Claim",
    "Codec",
    "PrefetchHint",
    "DiskTier",
    "EncodedEntry",
    "Entry",
    "EntryInfo",
    "FORMAT_VERSION",
    "Identity",
    "Item",
    "Job",
    "LRU",
    "Lease",
    "MemoryTier",
    "POLICIES",
    "Policy",
    "ReadOnlyDiskTier",
    "RemoteStats",
    "Speed",
    "Store",
    "StoreStats",
    "Tier",
    "TierKind",
    "TierStats",
    "Turn",
    "HintedEntry",
    "aligned_empty",
    "dtype_from_name",
    "dtype_name",
    "ids_bytes",
    "ids_digest",
    "make_policy",
]
