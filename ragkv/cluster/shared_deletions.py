"""Tells all replicas what one of them deleted, so that no other keeps it."""

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from ragkv.errors import SessionUnavailableError
from ragkv.runtime import Closing
from ragkv.store.entry import EntryKey

from .pending_deletions import PendingDeletions

if TYPE_CHECKING:
    from .redis_session_storage import RedisSessionStorage  # imports redis-py

log = logging.getLogger(__name__)

# How often stored blocks are compared with the conversations, after an outage too.
TIDY_S = 600.0
# `UNTOLD` has the keys of deleted entries that others were not told of yet.
UNTOLD = "deletions-untold.json"
POLL_S = 2.0  # how often a replica looks for what others deleted


class SharedDeletions(Closing):
    """Tells other replicas of deletions here, and follows theirs on a thread of its own."""

    def __init__(
        self,
        storage: "RedisSessionStorage",
        folder: Path | None,
        delete_unused: Callable[[Iterable[EntryKey]], None],
        tidy: Callable[[], None],
    ) -> None:
        """In `folder` what was not told yet outlives the process; with `None` it does not.

        `delete_unused` deletes those of some blocks that are in no session; `tidy` looks for all
        such blocks, which takes longer.
        """
        self._storage = storage
        self._delete_unused = delete_unused
        self._tidy = tidy
        self._untold = PendingDeletions(None if folder is None else folder / UNTOLD)
        # when the stored blocks are compared with the conversations again, monotonic
        self._tidy_at = 0.0
        self._position = "0"  # of the last deletion that was followed
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="ragkv-sessions", daemon=True)
        self._thread.start()

    @contextmanager
    def announcing(self, keys: Sequence[EntryKey]) -> Iterator[None]:
        """The block deletes the entries of `keys`. Noted first: a kill, or an outage, only delays
        what is told. Raises `StoreError`, and nothing is deleted, if that cannot be noted.
        """
        if keys:
            self._untold.add(*keys)
        yield
        try:
            self._announce(keys)
        except SessionUnavailableError as error:
            log.warning("Other replicas are told of %d deleted entries later: %s", len(keys), error)

    def close(self) -> None:
        self._closing.set()
        self._thread.join()

    def _announce(self, keys: Sequence[EntryKey]) -> None:
        """Tell the other replicas of deleted entries. Raises `SessionUnavailableError`."""
        if keys:
            self._storage.announce(keys)
            self._untold.confirm(*keys)

    def _follow_deletions(self) -> None:
        """Delete the blocks and chunks that others deleted since the last time."""
        while not self._closing.is_set():
            position, keys = self._storage.deleted(self._position)
            if position == self._position:
                return
            self._position = position
            self._delete_unused(keys)

    def _follow(self) -> None:
        while not self._closing.wait(POLL_S):
            try:
                self._storage.probe()
                self._announce(sorted(self._untold.keys))
                self._follow_deletions()
                self._delete_unused(())  # what could not be deleted while the server was away
                if time.monotonic() >= self._tidy_at:
                    self._tidy()
                    self._tidy_at = time.monotonic() + TIDY_S
            except SessionUnavailableError as error:
                # the log may be lost with the server, or deletions may have left it
                self._tidy_at = 0.0
                log.debug("%s", error)
            except Exception:  # an unexpected error must not end the thread
                log.exception("Deletions by other replicas were not followed; trying again.")
