"""Who may compute, and when: the scheduler of an engine, and batched decoding."""

from .decode_batch import DecodeBatch
from .scheduler import ModelTurns, QueueStats, Scheduler, Work

__all__ = ["DecodeBatch", "ModelTurns", "QueueStats", "Scheduler", "Work"]
