"""Who may compute, and when: the scheduler of an engine, and batched decoding."""

from .decode_batch import DecodeBatch
from .idle_time import IdleTime
from .queue_stats import QueueStats
from .scheduler import Scheduler, SharedCompute

__all__ = ["DecodeBatch", "IdleTime", "QueueStats", "Scheduler", "SharedCompute"]
