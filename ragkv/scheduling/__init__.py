"""Who may compute, and when: the scheduler of an engine, and batched decoding."""

from .background_turns import QueueStats
from .decode_batch import DecodeBatch
from .scheduler import Scheduler, SharedCompute, Work

__all__ = ["DecodeBatch", "SharedCompute", "QueueStats", "Scheduler", "Work"]
