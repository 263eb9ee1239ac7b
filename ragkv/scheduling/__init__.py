"""Who may compute, and when: the scheduler of an engine, and batched decoding."""

from .decode_batch import DecodeBatch
from .idle_time import IdleTime
from .queue_stats import QueueStats
from .scheduler import Scheduler, SharedCompute, Work

__all__ = ["IdleTime", "DecodeBatch", "QueueStats", "Scheduler", "SharedCompute", "Work"]
