"""The directory in which a replica keeps its KV: the first numbered directory that no other process uses.

A replica that is restarted, or that replaces another one, finds on disk what the earlier replica left.
"""

from pathlib import Path

from filelock import FileLock, Timeout

from ragkv.errors import StoreLockedError
from ragkv.runtime import Closing, make_private_folder

MAX_REPLICAS = 1_000  # `MAX_REPLICAS` is how many directories are tried.


class ReplicaDirectory(Closing):
    """A directory that belongs to this process until it is closed."""

    def __init__(self, home: Path) -> None:
        """Raises `StoreLockedError` if all directories are in use."""
        make_private_folder(home)
        for number in range(MAX_REPLICAS):
            self.path = home / f"replica-{number}"
            make_private_folder(self.path)
            self._lock = FileLock(self.path / ".lock", mode=0o600)
            try:
                self._lock.acquire(timeout=0)
            except Timeout:
                continue
            return
        raise StoreLockedError(f"All {MAX_REPLICAS} directories of replicas under {home} are in use.")

    def close(self) -> None:
        """Release the directory. May be called twice."""
        self._lock.release()
