"""Threads, files, memory, addresses and errors of request bodies, below everything else: knows no
model, no prompt and no store.
"""

from . import openmp
from .byte_cache import ByteCache, cached_by_bytes
from .fair_lock import FairLock, TimeShareQueue, Wait
from .files import (
    DAMAGED,
    aside_of,
    cache_folder,
    examples,
    is_missing,
    make_private_folder,
    only_owner_writes,
    read_own,
    replace_file,
    sync,
)
from .lifetime import Closing, begun, close_dropped, close_elsewhere
from .memory import (
    available_bytes,
    freeze_objects,
    limit_arenas,
    limit_kernel_caches,
    loading_objects,
    release_memory,
)
from .open_pool import OpenPool
from .openmp import ThreadChoice
from .processor import cores, cpu_features, cpu_load, cpu_model, crowding_hint
from .rates import Rate, counted, duration, seconds_of
from .server_file import is_loopback
from .sqlite_files import FileState, create_private, state_of
from .waiting import (
    Check,
    Claim,
    PausingCheck,
    acquired,
    no_check,
    stop_of,
)

__all__ = [
    "ByteCache",
    "DAMAGED",
    "Check",
    "Claim",
    "Closing",
    "FairLock",
    "FileState",
    "OpenPool",
    "PausingCheck",
    "Rate",
    "ThreadChoice",
    "TimeShareQueue",
    "Wait",
    "acquired",
    "begun",
    "available_bytes",
    "cache_folder",
    "cached_by_bytes",
    "close_dropped",
    "close_elsewhere",
    "cores",
    "counted",
    "cpu_features",
    "cpu_load",
    "cpu_model",
    "create_private",
    "crowding_hint",
    "duration",
    "examples",
    "freeze_objects",
    "is_loopback",
    "is_missing",
    "limit_arenas",
    "limit_kernel_caches",
    "loading_objects",
    "make_private_folder",
    "no_check",
    "only_owner_writes",
    "openmp",
    "aside_of",
    "read_own",
    "release_memory",
    "replace_file",
    "seconds_of",
    "state_of",
    "stop_of",
    "sync",
]
