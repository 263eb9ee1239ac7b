"""Where a replica keeps its KV: the first of the numbered directories that no other process has.

A replica that is started anew, or in place of another, finds on disk what was there before.
"""

from pathlib import Path

from filelock import FileLock, Timeout

from ragkv.errors import StoreLockedError
from ragkv.runtime import Closing

MOST = 1_000


class Place(Closing):
    """A directory for this process alone, until it is closed."""

    def __init__(self, home: Path) -> None:
        """Raises `StoreLockedError` if all are taken."""
        home.mkdir(parents=True, exist_ok=True, mode=0o700)
        for number in range(MOST):
            self.path = home / f"replica-{number}"
            self.path.mkdir(exist_ok=True, mode=0o700)
            self._lock = FileLock(self.path / ".lock", mode=0o600)
            try:
                self._lock.acquire(timeout=0)
            except Timeout:
                continue
            return
        raise StoreLockedError(f"All {MOST} directories of replicas under {home} are in use.")

    def close(self) -> None:
        """Leave it to others. Twice is harmless."""
        self._lock.release()


__all__ = ["Place"]
