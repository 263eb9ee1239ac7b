"""The disk tier beside its writer: another process may add, evict and delete under it, and this one writes nothing.

It needs no index and no lock: a file's name is its key, what is visible is whole, and an open file stays readable. A
file that vanished is a miss; a damaged one is a miss too, and left to the writer to drop.
"""

import logging
import os
import threading
from collections.abc import Callable, Iterator, Sequence, Set
from pathlib import Path
from typing import Never

from ragkv.errors import EntryDamagedError, StoreReadOnlyError

from ..directory import EntryDirectory
from ..encoded import EncodedEntry
from ..entry import Entry, EntryInfo, Identity
from ..record import OtherVersionError, read_head
from .base import Lease, Tier, TierKind, TierStats
from .disk_lease import open_lease
from .ledger import Counts

log = logging.getLogger(__name__)


class ReadOnlyDiskTier(Tier):
    """Entries on disk, written by somebody else. `stats` counts what is visible now; the capacity is not ours."""

    kind = TierKind.DISK
    read_only = True

    def __init__(self, directory: str | Path, direct: bool = False) -> None:
        """Raises `StoreError` if there is no store in `directory`."""
        self._directory = EntryDirectory(directory)
        self._directory.open_for_reading()
        self._direct = direct
        self._counts = Counts()
        self._lock = threading.RLock()

    def lease(self, identity: Identity, token_ids: Sequence[int]) -> Lease | None:
        key = identity.key(token_ids)
        lease: Lease | None = None
        try:
            path = self._directory.path(key)
            lease = open_lease(
                path, key, identity, token_ids, self._direct, self._count_read, self._damaged, lambda: None
            )
        except FileNotFoundError:
            pass
        except EntryDamagedError as error:
            self._damaged(error)
        except OSError as error:
            log.warning("Entry %s cannot be opened: %s. It counts as a miss.", key[:12], error)
        with self._lock:
            self._counts.hits += lease is not None
            self._counts.misses += lease is None
        return lease

    def put(self, entry: Entry | EncodedEntry, protected: Set[str] = frozenset()) -> bool:
        """Raises `StoreReadOnlyError`."""
        self._refuse(f"keep entry {entry.info.key[:12]}")

    def delete(self, key: str) -> bool:
        """Raises `StoreReadOnlyError`."""
        self._refuse(f"delete entry {key[:12]}")

    def gc(self, keep: Callable[[Identity], bool]) -> int:
        """Raises `StoreReadOnlyError`."""
        self._refuse("drop entries")

    def contains(self, key: str) -> bool:
        return self._directory.path(key).exists()

    def infos(self) -> Iterator[EntryInfo]:
        for key, _ in self._directory.scan():
            try:
                fd = os.open(self._directory.path(key), os.O_RDONLY | os.O_CLOEXEC)
            except OSError:
                continue  # the writer was faster
            try:
                yield read_head(fd, key).info
            except OtherVersionError:
                pass
            except (EntryDamagedError, OSError) as error:
                log.warning("%s", error)
            finally:
                os.close(fd)

    def stats(self) -> TierStats:
        sizes = [size for _, size in self._directory.scan()]
        with self._lock:
            return self._counts.stats(self.kind, len(sizes), sum(sizes), sum(sizes))

    def close(self) -> None:
        """Nothing is held but by leases."""

    def _damaged(self, error: EntryDamagedError) -> None:
        log.warning("%s", error)
        with self._lock:
            self._counts.damaged += 1

    def _count_read(self, size: int) -> None:
        with self._lock:
            self._counts.read_bytes += size

    def _refuse(self, what: str) -> Never:
        raise StoreReadOnlyError(
            f"The store in {self._directory.root} is open for reading only; it cannot {what}. "
            "Open it without read_only in the one process that writes."
        )
