"""Tells how much memory is free, returns memory to the operating system, and keeps a process from
growing.
"""

import ctypes
import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

# How many compiled kernels are kept, one for each shape of a product; a model's
# layers for one row need about ten.
KERNEL_CACHES = {
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": 128,  # of the process
    "LRU_CACHE_CAPACITY": 1,  # of each thread, in front of the other
}

# How many areas of memory GNU libc takes from, and M_ARENA_MAX is the option's number.
ARENAS = 2
M_ARENA_MAX = -8

_CGROUP = Path("/sys/fs/cgroup")  # has the limits of a container (version 2)


def available_bytes() -> int | None:
    """Memory that this process can still take, a container's limit included; `None` if the system
    does not say.
    """
    found = [_free_of_machine(), _free_of_container()]
    return min((value for value in found if value is not None), default=None)


def _free_of_machine() -> int | None:
    """What can be taken without swapping."""
    with suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        return (
            int(next(line.split()[1] for line in lines if line.startswith("MemAvailable"))) * 1024
        )
    return None


def _free_of_container() -> int | None:
    with suppress(OSError, ValueError):
        limit = int((_CGROUP / "memory.max").read_text())  # "max": a ValueError, so no limit
        used = int((_CGROUP / "memory.current").read_text())
        stat = dict(line.split() for line in (_CGROUP / "memory.stat").read_text().splitlines())
        # pages of files are given up when needed
        return max(0, limit - used + int(stat.get("inactive_file", 0)))
    return None


def release_memory() -> None:
    """Give back what this process has freed. No-op without GNU libc.

    GNU libc keeps freed memory in an arena for each thread, so every thread that ever computed a
    large batch would hold as much as its largest one.
    """
    if (libc := _gnu_libc()) is not None:
        libc.malloc_trim(0)


def limit_arenas() -> None:
    """Let all threads take memory from few areas. Call it before threads start. No-op without GNU
    libc.

    By default every new thread gets an area of its own, eight for each core. What one thread frees
    there is of no use to the others, so a server that keeps 1 GB takes 2.
    """
    if (libc := _gnu_libc()) is not None:
        libc.mallopt(M_ARENA_MAX, ARENAS)


def freeze_objects() -> None:
    """Leave all objects of this moment out of later garbage collections. Call it once, when a
    server has started.

    A full collection stops every thread of the process. With a model and its libraries loaded it
    takes half a second; with their objects left out, less than a millisecond.
    """
    gc.collect()
    gc.freeze()


@contextmanager
def loading_objects() -> Iterator[None]:
    """No garbage collections inside the block, which imports libraries and loads a model.

    They make a million objects, nearly all of which stay. Looking through them again and again
    takes a fifth of the processor time of the imports.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def limit_kernel_caches() -> None:
    """Keep few compiled kernels of products. Call it before the first product of this process.

    In bfloat16 on a CPU, oneDNN compiles about .3 MB for each number of rows and each shape of a
    layer. It keeps 1,024 of them, and torch another 1,024 for each thread. Prompts have many
    lengths, so a server would grow by gigabytes. With few it computes as fast: lengths seldom
    repeat. Values that the environment has are kept.
    """
    for name, capacity in KERNEL_CACHES.items():
        os.environ.setdefault(name, str(capacity))


@cache
def _gnu_libc() -> ctypes.CDLL | None:
    found = ctypes.CDLL(None)
    return found if hasattr(found, "malloc_trim") else None
