"""The files of the disk tier: their names, how they are listed, and how their directory is opened.

    writer.lock, writer.txt   the lock of the one writing process, and who it is (`writer_lock.py`)

    tmp/                      files being written; at open, those that a killed writer left

    entries/ab/ab12...kv      complete, durable files, named by their key

    entries/ab/ab12....GROUP.INDEX.kv   a conversation's block, named by its place, too

The files alone say what is stored. A name has what the policy must know. The size and the time of
modification say how much room a file takes and when it was used last. There is no index that could
disagree with the files after a kill or a flipped bit. (With an index in SQLite, one row an entry,
the tier opened no faster.)
"""

import contextlib
import logging
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import filelock

from ragkv.errors import StoreError
from ragkv.runtime import make_private_folder

from .. import writer_lock
from ..entry import EntryKey
from ..policies import Item

log = logging.getLogger(__name__)

ENTRIES = "entries"  # the folder of entry files, in the tier's directory
SUFFIX = ".kv"
_NAME = re.compile(r"([0-9a-f]{64})(?:\.([\w-]+)\.(\d+))?\.kv", re.ASCII)
_OLD_SUFFIX = ".safetensors"  # of entries of format 5 and before


class EntryFile(NamedTuple):
    """A file that a listing found."""

    item: Item
    path: str  # a `Path` takes as long as all the rest of a listing
    used: float  # seconds since the epoch


def file_of(root: Path, item: Item) -> Path:
    """The file of `item` in the disk tier's directory `root`, whether it exists or not."""
    name = item.key.to_text()
    place = f".{item.group}.{item.index}" if item.group else ""
    return root / ENTRIES / name[:2] / f"{name}{place}{SUFFIX}"


def listed(root: Path) -> Iterator[EntryFile]:
    """Every entry file, in no particular order. Files may vanish meanwhile; others are passed."""
    for shard in _names(root / ENTRIES):
        for file in _names(Path(shard.path)):
            found = _NAME.fullmatch(file.name)
            if found is not None and file.name[:2] == shard.name:
                with contextlib.suppress(FileNotFoundError):
                    stat = file.stat()
                    key, group, index = found.groups()
                    item = Item(EntryKey(key), stat.st_size, group or "", int(index or 0))
                    yield EntryFile(item, file.path, stat.st_mtime)


def open_for_writing(root: Path, drafts: Path) -> filelock.BaseFileLock:
    """The writer's lock, held; the folders are made, and what is of no use any more is removed.

    Raises `StoreLockedError` if another process has the lock, and `StoreError`.
    """
    lock = None
    try:
        make_private_folder(root)
        for folder in (root / ENTRIES, drafts):
            make_private_folder(folder)
            # it may have existed with another mode; the root may hold other people's files
            folder.chmod(0o700)
        lock = writer_lock.acquire(root)
        for orphan in drafts.iterdir():
            orphan.unlink(missing_ok=True)
    except OSError as error:
        if lock is not None:
            lock.release()
        raise StoreError(
            f"Cannot write to the store directory {root}: {error.strerror or error}. Choose "
            "another directory, or open this one with read_only=True."
        ) from error
    if (root / "index").is_dir():  # earlier versions had one, and entries that nobody reads now
        old = list((root / ENTRIES).glob(f"??/*{_OLD_SUFFIX}"))
        log.info("%d entries of an earlier version of ragkv are removed.", len(old))
        for path in old:
            path.unlink(missing_ok=True)
        shutil.rmtree(root / "index", ignore_errors=True)
    return lock


def _names(folder: Path) -> list[os.DirEntry[str]]:
    """The contents of `folder`; empty if it vanished or is not a directory."""
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except (FileNotFoundError, NotADirectoryError):
        return []
