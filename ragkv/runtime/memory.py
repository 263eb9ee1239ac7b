"""Memory given back to the operating system."""

import ctypes
from functools import cache


def release_memory() -> None:
    """Give back what this process has freed. No-op without GNU libc.

    GNU libc keeps freed memory in an arena for each thread, so every thread that ever computed a large batch would hold
    as much as its largest one.
    """
    if (libc := _gnu_libc()) is not None:
        libc.malloc_trim(0)


@cache
def _gnu_libc() -> ctypes.CDLL | None:
    try:
        found = ctypes.CDLL(None)
    except (OSError, TypeError):  # Windows has no such name
        return None
    return found if hasattr(found, "malloc_trim") else None


__all__ = ["release_memory"]
