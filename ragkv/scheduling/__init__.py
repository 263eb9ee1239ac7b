"""Who may compute, and when: the scheduler of an engine, and batched decoding."""

from .background_turns import QueueStats, SharedCompute
from .decode_batch import DecodeBatch
from .scheduler import Scheduler, Work

__all__ = ["DecodeBatch", "SharedCompute", "QueueStats", "Scheduler", "Work"]
