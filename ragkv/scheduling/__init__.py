"""Who may compute, and when: admission, the compute lock, batched decoding, routing to replicas.

Routing and the simulator need no torch, so it loads with the first name of this door.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .admission import AdmissionQueue, IdleTicket, QueueStats, Ticket
    from .compute_lock import Activity, ComputeLock, Waiter
    from .decode_batch import DecodeBatch, DecodeSlot

_MODULES = (".compute_lock", ".admission", ".decode_batch")


def __getattr__(name: str) -> Any:
    if name in __all__:
        for path in _MODULES:
            module = importlib.import_module(path, __name__)
            if hasattr(module, name):
                return getattr(module, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "Activity",
    "AdmissionQueue",
    "ComputeLock",
    "DecodeBatch",
    "DecodeSlot",
    "IdleTicket",
    "QueueStats",
    "Ticket",
    "Waiter",
]
