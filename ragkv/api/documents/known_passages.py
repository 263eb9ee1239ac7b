"""The passages of a tenant's collections, as they are looked for in its chat messages.

When a collection has changed, its new passages are read: at the end of the change, and every two
seconds if another process made it (`DeletionFollower`). Only the first questions of a tenant wait
for that. Only the words of passages are held, up to about a limit for each tenant. Passages beyond
the limit are not found in messages, and the notes of an answer say so.
"""

import logging
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, field

from ragkv.chat import PassageMatcher
from ragkv.errors import StoreError
from ragkv.retrieval import index_state, look_into
from ragkv.runtime import FileState, counted

from .collection_folders import CollectionFolders, CollectionKey

log = logging.getLogger(__name__)

BATCH = 500  # passages that are read at once
PAUSE = 100  # The next look at all collections waits this many times what the last one took.


@dataclass(slots=True)
class _Known:
    """What is known of one collection."""

    state: FileState | None = None  # of its index when it was read
    keys: dict[int, str] = field(default_factory=dict)  # by the number of the text
    unread: int = 0  # how many of its texts are beyond the limit


class KnownPassages:
    """Keeps a matcher true to the collections of one tenant."""

    def __init__(
        self, folders: CollectionFolders, matcher: PassageMatcher, limit_chars: int
    ) -> None:
        self._folders = folders
        self._matcher = matcher
        self._limit = limit_chars
        self._lock = threading.Lock()
        self._known: dict[CollectionKey, _Known] = {}
        self._look_at = 0.0  # the time of the next look at the collections, on the monotonic clock
        self.notes: tuple[str, ...] = ()  # for answers: one, if passages are unread
        self.read = threading.Event()  # set after the first look

    def refresh(self, at_once: bool = False) -> None:
        """Read the collections that have changed: `at_once`, or unless the last look has just
        been.
        """
        try:
            with self._lock:
                if at_once or time.monotonic() >= self._look_at:
                    self._refresh()
        finally:
            self.read.set()

    def _refresh(self) -> None:
        began = time.monotonic()
        found = {
            key for name in self._folders.names() if (key := self._folders.key(name)) is not None
        }
        states = {key: index_state(key.path) for key in sorted(found, key=lambda one: one.path)}
        self._look_at = time.monotonic() + PAUSE * (time.monotonic() - began)
        for key in self._known.keys() - found:
            self._forget(self._known.pop(key).keys.values())
        for key, state in states.items():
            known = self._known.setdefault(key, _Known())
            has_room = known.unread and self._matcher.chars < self._limit  # others are gone
            if state is None or (state == known.state and not has_room):
                continue
            # another file has other numbers
            if known.state is not None and known.state.inode != state.inode:
                self._forget(self._known.pop(key).keys.values())
                known = self._known[key] = _Known()
            try:
                self._read(key, known)
                known.state = state
            except StoreError:
                log.exception("passages_not_read")

        unread = sum(known.unread for known in self._known.values())
        note = f"{counted(unread, 'passage')}; limits.known_chars is {self._limit}"
        self.notes = (f"Not looked for in messages: {note}",) if unread else ()

    def _read(self, key: CollectionKey, known: _Known) -> None:
        """Know the passages that a collection has, and forget what it has no more."""
        with look_into(key.path) as index:
            numbers = [] if index is None else index.texts.numbers()
            gone = known.keys.keys() - set(numbers)
            self._forget([known.keys.pop(number) for number in gone])
            new = [number for number in numbers if number not in known.keys]
            while new and self._matcher.chars < self._limit:
                assert index is not None
                texts = index.contents.texts(new[:BATCH])
                new = new[BATCH:]
                known.keys |= zip(texts, self._matcher.add(texts.values()), strict=True)
            known.unread = len(new)

    def _forget(self, keys: Iterable[str]) -> None:
        """Forget the passages that no collection has any more."""
        gone = set(keys)
        if gone:
            self._matcher.forget(
                gone.difference(*(known.keys.values() for known in self._known.values()))
            )
