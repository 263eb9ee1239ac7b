"""Deletions that a remote has not confirmed yet: kept on disk until it has, and never forgotten over a restart.

One JSON list, replaced as a whole: there are few, and they are gone as soon as the remote answers.
"""

import json
import logging
import os
import threading
from collections.abc import Iterable
from pathlib import Path

log = logging.getLogger(__name__)


class Tombstones:
    """Keys to be deleted. Thread-safe."""

    def __init__(self, path: Path | None) -> None:
        """What is noted in `path`; with `None` in memory alone, so that a restart forgets."""
        self._path = path
        self._lock = threading.Lock()
        self._keys: set[str] = set(_read(path)) if path is not None else set()

    def __len__(self) -> int:
        return len(self._keys)

    def __contains__(self, key: object) -> bool:
        return key in self._keys

    def pending(self) -> list[str]:
        """All of them, now."""
        with self._lock:
            return sorted(self._keys)

    def add(self, key: str) -> None:
        """Note `key`, durably."""
        with self._lock:
            self._keys.add(key)
            self._write()

    def discard(self, key: str) -> None:
        """`key` is deleted where it was."""
        with self._lock:
            if key in self._keys:
                self._keys.discard(key)
                self._write()

    def _write(self) -> None:
        if self._path is None:
            return
        draft = self._path.with_suffix(".tmp")
        try:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with draft.open("w", encoding="utf-8") as file:
                json.dump(sorted(self._keys), file)
                file.flush()
                os.fsync(file.fileno())
            draft.replace(self._path)
        except OSError as error:
            log.error("Pending deletions cannot be noted in %s: %s. A restart would forget them.", self._path, error)


def _read(path: Path) -> Iterable[str]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return ()
    except (OSError, ValueError) as error:
        log.error("Pending deletions in %s cannot be read: %s. Delete those documents again.", path, error)
        return ()
    return [key for key in found if isinstance(key, str)] if isinstance(found, list) else ()
