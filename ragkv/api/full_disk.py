"""A full disk: how its errors are told from others, and work that is repeated once there is room.

Pure Python.
"""

import errno
import sqlite3
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

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


def making_room(work: Callable[[], T], give_way: Callable[[], bool]) -> T:
    """Do `work`, which leaves everything as it was if it fails. While the disk is too full for it,
    call `give_way` and do it again.

    `give_way` frees some space; it returns `False` if there is none to free. Raises what `work`
    raises.
    """
    while True:
        try:
            return work()
        except Exception as error:
            if not (is_disk_full(error) and give_way()):
                raise
