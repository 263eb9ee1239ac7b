"""The disk tier of a process that only reads, while another process may write.

It needs no ledger and no lock. A file's name is its key, a visible file is complete, and an open
file stays readable. A file that vanished is a miss. A damaged file is a miss too, and the writer
drops it.
"""

import contextlib
import logging
import os
import threading
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Never

from ragkv.errors import (
    EntryDamagedError,
    EntryUnreachableError,
    StoreError,
    StoreReadOnlyError,
)

from ..entry import EntryInfo, EntryKey, Identity, StoredEntry
from ..policies import LRU, Item
from ..record import OtherVersionError, read_info
from .base import UNLIMITED_BYTES, Tier
from .disk import DiskTier, open_lease, unread
from .entry_files import ENTRIES, SUFFIX, file_of, listed
from .lease import Lease
from .stats import Counts, TierKind, TierStats

log = logging.getLogger(__name__)


class ReadOnlyDiskTier(Tier):
    """Entries on disk that another process writes. `stats` counts the files visible now, also as
    the capacity.
    """

    kind = TierKind.DISK
    read_only = True

    def __init__(self, directory: str | Path) -> None:
        """Raises `StoreError` if there is no store in `directory`."""
        self._root = Path(directory)
        try:
            with os.scandir(self._root / ENTRIES):
                pass
        except OSError as error:
            raise StoreError(
                f"There is no store to read in {directory}: {error.strerror or error}. Check the "
                "directory, or open it once without read_only."
            ) from error
        self._counts = Counts()
        # re-entrant: garbage collection may close an abandoned lease while it is held
        self._lock = threading.RLock()

    def lease(self, identity: Identity, token_ids: Sequence[int]) -> Lease | None:
        lease: Lease | None = None
        with contextlib.suppress(FileNotFoundError):
            lease = open_lease(
                self._file(identity.key(token_ids)),
                identity,
                token_ids,
                on_read=self._count_read,
                on_damage=self._count_damage,
            )
        with self._lock:
            self._counts.hits += lease is not None
            self._counts.misses += lease is None
        return lease

    def put(self, entry: StoredEntry) -> bool:
        """Raises `StoreReadOnlyError`."""
        self._refuse(f"store entry {entry.info.key}")

    def delete(self, key: EntryKey) -> bool:
        """Raises `StoreReadOnlyError`."""
        self._refuse(f"delete entry {key}")

    def contains(self, key: EntryKey) -> bool:
        return self._file(key).exists()

    def scan(self) -> Iterator[tuple[EntryKey, EntryInfo | None]]:
        for file in listed(self._root):
            key = file.item.key
            try:
                yield key, read_info(Path(file.path), key)
            except FileNotFoundError:
                pass  # the writer removed it meanwhile
            except OSError as error:
                log.warning("%s", unread(key, "its file", error))
            except EntryDamagedError as error:
                if not isinstance(error, OtherVersionError):
                    log.warning("%s", error)
                yield key, None

    def stats(self) -> TierStats:
        found = list(listed(self._root))
        used = sum(file.item.size for file in found)
        with self._lock:
            return TierStats(self.kind, len(found), used, used, **asdict(self._counts))

    def scratch(self, folder: Path) -> DiskTier:
        return DiskTier(folder, UNLIMITED_BYTES, LRU())

    def close(self) -> None:
        """Do nothing: only leases hold resources."""

    def _file(self, key: EntryKey) -> Path:
        """The file of `key`: a chunk's, or else one whose name a listing tells, a block's."""
        chunk = file_of(self._root, Item(key, 0))
        if chunk.exists():
            return chunk
        return next(chunk.parent.glob(f"{key.to_text()}.*{SUFFIX}"), chunk)

    def _count_damage(self, error: EntryDamagedError) -> None:
        log.warning("%s", error)
        with self._lock:
            self._counts.damaged += not isinstance(error, EntryUnreachableError)

    def _count_read(self, size_bytes: int) -> None:
        with self._lock:
            self._counts.read_bytes += size_bytes

    def _refuse(self, what: str) -> Never:
        raise StoreReadOnlyError(
            f"The store in {self._root} is open for reading only; it cannot {what}. "
            "Open it without read_only in the one process that writes."
        )
