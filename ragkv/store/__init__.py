"""Stores entries. Knows nothing of transformers.

An `Entry` is the KV of one run of tokens, without positions; its `Identity` decides who may use it.
A `Store` is a stack of tiers that holds entries and leases them for reading. Policies need no
torch, so torch is loaded only with the first name that needs it.
"""

import importlib
from typing import TYPE_CHECKING, Any

from .policies import LRU, Item, Policy, TurnSize, make_policy

if TYPE_CHECKING:
    from .codecs import codec_of, stored_bytes
    from .contents import deleted_everywhere
    from .entry import (
        Entry,
        EntryInfo,
        EntryKey,
        Identity,
        conversation_group,
        dtype_name,
        ids_bytes,
        ids_digest,
    )
    from .job_queue import Job, JobQueue
    from .opening import kinds_of, open_store
    from .prefetch import HintedEntry, Prefetcher, PrefetchHint
    from .store import Store
    from .tiers import (
        DiskTier,
        Lease,
        MemoryLease,
        MemoryTier,
        RemoteStats,
        StoreStats,
        Tier,
        TierKind,
        TierStats,
    )

_MODULES = (
    ".codecs",
    ".contents",
    ".entry",
    ".job_queue",
    ".opening",
    ".prefetch",
    ".store",
    ".tiers",
)


def __getattr__(name: str) -> Any:
    if name in __all__:
        for module_name in _MODULES:
            module = importlib.import_module(module_name, __name__)
            if hasattr(module, name):
                return getattr(module, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "JobQueue",
    "DiskTier",
    "Entry",
    "EntryInfo",
    "EntryKey",
    "HintedEntry",
    "Identity",
    "Item",
    "Job",
    "LRU",
    "Lease",
    "MemoryLease",
    "MemoryTier",
    "Policy",
    "PrefetchHint",
    "Prefetcher",
    "RemoteStats",
    "Store",
    "open_store",
    "StoreStats",
    "Tier",
    "TierKind",
    "TierStats",
    "TurnSize",
    "codec_of",
    "conversation_group",
    "deleted_everywhere",
    "dtype_name",
    "ids_bytes",
    "ids_digest",
    "kinds_of",
    "make_policy",
    "stored_bytes",
]
