"""Notes deletions on disk until the remote has confirmed them, so that a restart forgets none.

The file is one JSON list, and is replaced as a whole. It is short, because notes are removed as
soon as the remote answers.
"""

import json
import logging
import threading
from pathlib import Path

from ragkv.errors import StoreError
from ragkv.runtime import make_private_folder, replace_file
from ragkv.store.entry import EntryKey

log = logging.getLogger(__name__)


class PendingDeletions:
    """The keys of pending deletions."""

    def __init__(self, path: Path | None) -> None:
        """Read the keys noted in `path`. With `None` they stay in memory, and a restart forgets
        them. Raises `StoreError` if the file cannot be read now: the next note would replace it.
        """
        self.keys: frozenset[EntryKey] = frozenset() if path is None else _read(path)
        self._path = path
        self._lock = threading.Lock()

    def add(self, *keys: EntryKey) -> None:
        """Note `keys`, durably. Raises `StoreError` if the disk does not take them; this process
        knows them all the same.
        """
        with self._lock:
            self.keys |= set(keys)
            self._write()

    def confirm(self, *keys: EntryKey) -> None:
        """The remote has confirmed the deletion of `keys`."""
        with self._lock:
            if not self.keys.isdisjoint(keys):
                self.keys -= set(keys)
                try:
                    self._write()
                except StoreError as error:  # a restart deletes them once more
                    log.warning("%s", error)

    def _write(self) -> None:
        if self._path is None:
            return
        try:
            make_private_folder(self._path.parent)
            replace_file(
                self._path, json.dumps(sorted(key.to_text() for key in self.keys)).encode()
            )
        except OSError as error:
            raise StoreError(
                f"Pending deletions cannot be noted in {self._path}: {error}. A restart would "
                "forget them: delete again when the disk is well."
            ) from error


def _read(path: Path) -> frozenset[EntryKey]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return frozenset()
    except OSError as error:
        raise StoreError(
            f"Pending deletions in {path} cannot be read: {error}. Without them deleted text would "
            "stay on the server: check who may read the file, and begin again."
        ) from error
    except (RecursionError, ValueError) as error:
        log.error(
            "Pending deletions in %s cannot be read: %s. Delete those documents again.", path, error
        )
        return frozenset()
    keys = [EntryKey.from_text(str(text)) for text in found] if isinstance(found, list) else [None]
    if None in keys:
        log.error(
            "Pending deletions in %s name what is no key. Delete those documents again.", path
        )
    return frozenset(key for key in keys if key is not None)
