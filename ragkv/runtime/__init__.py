"""Threads and resources, below everything else: knows no model, no prompt and no store."""

from . import openmp
from .batches import BatchLock, Check, acquired, never_urgent, no_check
from .closing import Closing
from .files import make_private_folder, replace_file, sync
from .lease_pool import LeasePool
from .memory import release_memory
from .priority_pool import PriorityThreadPool

__all__ = [
    "BatchLock",
    "Check",
    "Closing",
    "LeasePool",
    "PriorityThreadPool",
    "acquired",
    "never_urgent",
    "no_check",
    "make_private_folder",
    "openmp",
    "release_memory",
    "replace_file",
    "sync",
]
