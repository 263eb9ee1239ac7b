"""The directory in which a replica keeps its KV."""

from pathlib import Path

from filelock import FileLock, Timeout

from ragkv.errors import StoreLockedError
from ragkv.runtime import make_private_folder

MAX_REPLICAS = 1_000  # `MAX_REPLICAS` is how many directories are tried.


def lock_directory(home: Path) -> tuple[Path, FileLock]:
    """The first numbered directory that no other process uses, and its lock, which is held until it is released.

    A replica that is restarted or replaced finds there what the earlier one left. Raises `StoreLockedError` if all are
    in use.
    """
    for number in range(MAX_REPLICAS):
        path = home / f"replica-{number}"
        make_private_folder(path)
        lock = FileLock(path / ".lock", mode=0o600)
        try:
            lock.acquire(timeout=0)
        except Timeout:
            continue
        return path, lock
    raise StoreLockedError(f"All {MAX_REPLICAS} directories of replicas under {home} are in use.")
