"""The directory in which a replica keeps its KV."""

import itertools
from pathlib import Path

from filelock import FileLock, Timeout

from ragkv.runtime import make_private_folder


def lock_directory(home: Path) -> tuple[Path, FileLock]:
    """The first numbered directory that no other process uses, and its lock, which is held until it
    is released.

    A replica that is restarted or replaced finds there what the earlier one left.
    """
    for number in itertools.count():
        path = home / f"replica-{number}"
        make_private_folder(path)
        lock = FileLock(path / ".lock", mode=0o600)
        try:
            lock.acquire(timeout=0)
        except Timeout:
            continue
        return path, lock
    raise AssertionError("a number is always free")
