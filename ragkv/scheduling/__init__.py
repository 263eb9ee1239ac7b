"""Who may compute, and when: the scheduler of an engine, batched decoding, routing to replicas.

Routing and the simulator need no torch, so it loads with the first name of this door.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .decode_batch import DecodeBatch, DecodeSlot
    from .scheduler import ModelTurns, QueueStats, Scheduler
    from .ticket import Ticket

_MODULES = (".ticket", ".decode_batch", ".scheduler")


def __getattr__(name: str) -> Any:
    if name in __all__:
        for path in _MODULES:
            module = importlib.import_module(path, __name__)
            if hasattr(module, name):
                return getattr(module, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "DecodeBatch",
    "DecodeSlot",
    "ModelTurns",
    "QueueStats",
    "Scheduler",
    "Ticket",
]
