"""SQLite files that several processes write: made and watched without opening them.

A process that closes any descriptor of a file gives up all its POSIX locks on the file, those too
under which SQLite writes on another thread. Another process may then write at the same time ("How
To Corrupt An SQLite Database File" by SQLite's authors, section 2.2). So only SQLite opens such a
file.
"""

import contextlib
import os
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from .files import make_private_folder

# How exact a file's time is at worst: on some file systems to a second.
SETTLED_S = 1.0


class FileState(NamedTuple):
    """A value that every transaction on a file changes."""

    inode: int  # another file has another one
    changed: object


def create_private(file: Path) -> None:
    """Make an empty file that only its owner may open, and its folder, unless they are there.
    Raises `OSError`.
    """
    if file.exists():
        return
    make_private_folder(file.parent)
    # SQLite does not know this name
    descriptor, name = tempfile.mkstemp(prefix=".new-", dir=file.parent)
    os.close(descriptor)
    made = Path(name)
    try:
        with contextlib.suppress(FileExistsError):  # another process or thread was first
            file.hardlink_to(made)
    finally:
        made.unlink()


def state_of(file: Path) -> FileState | None:
    """The state of a file; `None` if there is none. Raises `OSError`.

    A state taken less than `SETTLED_S` after a change is equal to no other: another change may have
    the same time.
    """
    try:
        found = file.stat()
    except FileNotFoundError:
        return None
    is_settled = abs(time.time() - found.st_mtime) > SETTLED_S
    return FileState(found.st_ino, (found.st_mtime_ns, found.st_size) if is_settled else object())
