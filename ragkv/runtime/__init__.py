"""Threads, files, memory and addresses, below everything else: knows no model, no prompt and no
store.
"""

from . import openmp
from .addresses import is_loopback
from .batches import Check, PausingCheck, acquired, no_check, stop_of
from .brief import brief
from .byte_cache import ByteCache, cached_by_bytes
from .closing import Closing
from .fair_lock import FairLock, TimeShareQueue, Wait
from .files import (
    cache_folder,
    examples,
    make_private_folder,
    only_owner_writes,
    replace_file,
    sync,
)
from .full_disk import is_disk_full, making_room
from .lease_pool import LeasePool
from .memory import (
    available_bytes,
    freeze_objects,
    limit_arenas,
    limit_kernel_caches,
    release_memory,
)
from .own_files import DAMAGED, read_own
from .processor import cores, cpu_features, cpu_model, crowding_hint, load
from .rates import Rate, counted, duration, seconds_of
from .sqlite_files import FileState, create_private, state_of

__all__ = [
    "ByteCache",
    "DAMAGED",
    "Check",
    "Closing",
    "FairLock",
    "FileState",
    "LeasePool",
    "PausingCheck",
    "Rate",
    "TimeShareQueue",
    "Wait",
    "acquired",
    "available_bytes",
    "brief",
    "cache_folder",
    "cached_by_bytes",
    "cores",
    "counted",
    "cpu_features",
    "cpu_model",
    "create_private",
    "crowding_hint",
    "duration",
    "examples",
    "freeze_objects",
    "is_disk_full",
    "is_loopback",
    "limit_arenas",
    "limit_kernel_caches",
    "load",
    "make_private_folder",
    "making_room",
    "no_check",
    "only_owner_writes",
    "openmp",
    "read_own",
    "release_memory",
    "replace_file",
    "seconds_of",
    "state_of",
    "stop_of",
    "sync",
]
