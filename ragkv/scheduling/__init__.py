"""Who may compute, and when: the scheduler of an engine, and batched decoding."""

from .decode_batch import DecodeBatch, DecodeSlot
from .scheduler import ModelTurns, QueueStats, Scheduler, Ticket

__all__ = [
    "DecodeBatch",
    "DecodeSlot",
    "ModelTurns",
    "QueueStats",
    "Scheduler",
    "Ticket",
]
