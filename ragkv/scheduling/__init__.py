"""Who may compute, and when: the scheduler of an engine, and batched decoding."""

from .background_turns import BackgroundTurns
from .decode_batch import DecodeBatch
from .queue_stats import QueueStats
from .scheduler import Scheduler, SharedCompute, Work

__all__ = ["BackgroundTurns", "DecodeBatch", "QueueStats", "Scheduler", "SharedCompute", "Work"]
