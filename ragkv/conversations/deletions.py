"""Deletions that replicas tell each other: what one was asked to delete, no other keeps."""

import logging
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from ragkv.errors import SessionUnavailableError
from ragkv.runtime import Closing
from ragkv.store import EntryKey
from ragkv.store.remote.tombstones import Tombstones

if TYPE_CHECKING:
    from .redis_storage import RedisStorage  # imports redis-py

log = logging.getLogger(__name__)

ORPHANS_S = 600.0  # `ORPHANS_S` is how often stored blocks are compared with the conversations, after an outage too.
UNTOLD = "deletions-untold.json"  # `UNTOLD` has the keys of deleted entries that others were not told of yet.
POLL_S = 2.0  # `POLL_S` is how often a replica looks for what others deleted, and for idle conversations.


class BlockOwner(Protocol):
    """Knows which blocks are in use: `Conversations`."""

    def drop_unused(self, keys: Iterable[EntryKey]) -> None: ...

    def drop_orphans(self) -> int: ...


class SharedDeletions(Closing):
    """Tells other replicas of deletions here, and follows theirs on a thread of its own."""

    def __init__(self, owner: BlockOwner, storage: "RedisStorage", folder: Path | None) -> None:
        """In `folder` what was not told yet outlives the process; with `None` it does not."""
        self._owner, self._storage = owner, storage
        self._untold = Tombstones(None if folder is None else folder / UNTOLD)
        self._orphans_at = 0.0  # when the stored blocks are compared with the conversations again, monotonic
        self._position = "0"  # of the last deletion that was followed
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="ragkv-sessions", daemon=True)
        self._thread.start()

    @contextmanager
    def telling(self, keys: Sequence[EntryKey]) -> Iterator[None]:
        """The block deletes the entries of `keys`. Noted first: a kill, or an outage, only delays what is told."""
        if keys:
            self._untold.add(*keys)
        yield
        try:
            self._tell(keys)
        except SessionUnavailableError as error:
            log.warning("Other replicas are told of %d deleted entries later: %s", len(keys), error)

    def close(self) -> None:
        self._closing.set()
        self._thread.join()

    def _tell(self, keys: Sequence[EntryKey]) -> None:
        """Tell the other replicas of deleted entries. Raises `SessionUnavailableError`."""
        if keys:
            self._storage.announce(keys)
            self._untold.discard(*keys)

    def _drop_deleted(self) -> None:
        """Delete the blocks and chunks that others deleted since the last time."""
        while not self._closing.is_set():
            position, keys = self._storage.deleted(self._position)
            if position == self._position:
                return
            self._position = position
            self._owner.drop_unused(keys)

    def _follow(self) -> None:
        while not self._closing.wait(POLL_S):
            try:
                self._storage.probe()
                self._storage.sweep()
                self._tell(sorted(self._untold.keys))
                self._drop_deleted()
                if time.monotonic() >= self._orphans_at:
                    self._owner.drop_orphans()
                    self._orphans_at = time.monotonic() + ORPHANS_S
            except SessionUnavailableError as error:
                self._orphans_at = 0.0  # the log may be lost with the server, or deletions may have left it
                log.debug("%s", error)
            except Exception:  # an unexpected error must not end the thread
                log.exception("Deletions by other replicas were not followed; trying again.")
