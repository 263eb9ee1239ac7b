"""Threads, files, memory and addresses, below everything else: knows no model, no prompt and no store."""

from . import openmp
from .addresses import is_loopback
from .batches import BatchLock, Check, acquired, never_urgent, no_check
from .closing import Closing
from .files import make_private_folder, replace_file, sync
from .lease_pool import LeasePool
from .memory import available_bytes, freeze_objects, release_memory, total_bytes
from .priority_pool import PriorityThreadPool
from .thread_stream import iterate_in_thread
from .time_shares import OwnerQueues, TimeShareQueue, current_owner, working_for

__all__ = [
    "BatchLock",
    "Check",
    "Closing",
    "LeasePool",
    "OwnerQueues",
    "PriorityThreadPool",
    "TimeShareQueue",
    "acquired",
    "available_bytes",
    "current_owner",
    "freeze_objects",
    "is_loopback",
    "iterate_in_thread",
    "make_private_folder",
    "never_urgent",
    "no_check",
    "openmp",
    "release_memory",
    "replace_file",
    "sync",
    "total_bytes",
    "working_for",
]
