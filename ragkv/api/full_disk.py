"""A full disk: recognises its errors, repeats work once there is room, and reserves space for
deletions.

Pure Python.
"""

import errno
import shutil
import sqlite3
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from ragkv.config import MIB
from ragkv.runtime import replace_file

T = TypeVar("T")

RESERVE_BYTES = 4 * MIB  # kept for deletions
SPARE = 3  # the reserve is taken only if more than this many times as much is free

_FULL = (errno.ENOSPC, errno.EDQUOT)


def is_disk_full(error: BaseException | None) -> bool:
    """Whether an error, or one that led to it, says that the disk or the user's share of it is
    full. A client library may have made errors the causes of each other.
    """
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if isinstance(error, OSError) and error.errno in _FULL:
            return True
        if getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL:
            return True
        error = error.__cause__ or error.__context__
    return False


def making_room(work: Callable[[], T], free_disk: Callable[[], bool]) -> T:
    """Do `work`, which leaves everything as it was if it fails. While the disk is too full for it,
    call `free_disk` and do it again.

    `free_disk` frees some space; it returns `False` if there is none to free. Raises what `work`
    raises.
    """
    while True:
        try:
            return work()
        except Exception as error:
            if not (is_disk_full(error) and free_disk()):
                raise


class Reserve:
    """Space on a disk for deletions alone. What is deleted is noted first, and a full disk takes no
    note: without a reserve nothing could be deleted from it.
    """

    def __init__(self, folder: Path) -> None:
        self._file = folder / "reserve"
        self._lock = threading.Lock()

    def keep(self) -> None:
        """Take the space, unless it is taken or would be missed."""
        with self._lock, suppress(OSError):
            free = shutil.disk_usage(self._file.parent).free
            if not self._file.exists() and free > SPARE * RESERVE_BYTES:
                replace_file(self._file, bytes(RESERVE_BYTES))

    def give_up(self) -> bool:
        """Free the space; whether there was any."""
        with self._lock, suppress(FileNotFoundError):
            self._file.unlink()
            return True
        return False
