"""The disk tier's directory: file names, modes, the writer's lock, and how a file becomes visible.

    writer.lock, writer.txt     the lock of the one writing process, and which process holds it: see
                                `writer_lock.py`
    index/                      see `index.py`
    tmp/                        files being written; what is found here at open, a killed writer left
    entries/ab/ab12...safetensors   complete, durable files, named by their key

A file is synced under `tmp/` and then renamed to `entries/`, so every visible file is complete. A
reader needs only a key: a process that reads next to the writer either opens the file or has a
miss.
"""

import contextlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import filelock

from ragkv.errors import StoreError
from ragkv.runtime import make_private_folder, replace_file, sync

from .. import writer_lock
from ..entry import EntryKey
from ..record import Bytes
from .lease import ENTRIES, SUFFIX, entry_file


class EntryDirectory:
    """Paths and files of one disk tier."""

    def __init__(self, root: str | Path) -> None:
        self.root = Path(root)
        self.index = self.root / "index"
        self._entries = self.root / ENTRIES
        self._temporary = self.root / "tmp"
        self._lock: filelock.BaseFileLock | None = None

    def open_for_writing(self) -> None:
        """Make the directory, acquire the writer's lock, remove files that a killed writer left in
        `tmp/`.

        Raises `StoreLockedError` if another process holds the lock, `StoreError` if the directory
        cannot be written.
        """
        try:
            make_private_folder(self.root)
            for folder in (self._entries, self._temporary, self.index):
                make_private_folder(folder)
                # it may have existed with another mode; the root may hold other people's files
                folder.chmod(0o700)
            self._lock = writer_lock.acquire(self.root)
            for orphan in self._temporary.iterdir():
                orphan.unlink(missing_ok=True)
        except OSError as error:
            self.release()
            raise StoreError(
                f"Cannot write to the store directory {self.root}: {error.strerror or error}. "
                "Choose another directory, or open this one with read_only=True."
            ) from error

    def open_for_reading(self) -> None:
        """Raise `StoreError` if there is no store to read. Writes nothing."""
        try:
            with os.scandir(self._entries):
                pass
        except OSError as error:
            raise StoreError(
                f"There is no store to read in {self.root}: {error.strerror or error}. "
                "Check the directory, or open it once without read_only."
            ) from error

    def release(self) -> None:
        """Release the writer's lock. Twice is harmless."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def scan(self) -> Iterator[tuple[EntryKey, int]]:
        """Key and size in bytes of every entry file, in no particular order. Files may vanish
        meanwhile.
        """
        for shard in _listed(self._entries):
            for file in _listed(Path(shard.path)):
                text = file.name.removesuffix(SUFFIX)
                key = EntryKey.from_text(text) if text != file.name else None
                if key is not None and key.digest[:2] == shard.name:
                    with contextlib.suppress(FileNotFoundError):
                        yield key, file.stat().st_size

    def write(self, key: EntryKey, pieces: Iterable[Bytes]) -> None:
        """Write `pieces` to the file of `key`, which becomes visible after it is durable. Raises
        `OSError`.
        """
        path = entry_file(self.root, key)
        if not path.parent.is_dir():
            make_private_folder(path.parent)
            sync(self._entries)
        replace_file(path, *pieces, drafts=self._temporary)

    def remove(self, key: EntryKey, durably: bool = False) -> None:
        """Unlink the file of `key`, if it exists; `durably`: a power cut does not undo it. Raises
        `OSError`.
        """
        with contextlib.suppress(FileNotFoundError):
            entry_file(self.root, key).unlink()
            if durably:
                sync(entry_file(self.root, key).parent)


def _listed(folder: Path) -> list[os.DirEntry[str]]:
    """The contents of `folder`; empty if it vanished or is not a directory."""
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except (FileNotFoundError, NotADirectoryError):
        return []
