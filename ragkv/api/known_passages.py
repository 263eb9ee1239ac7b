"""The passages of a tenant's collections, as they are looked for in its chat messages.

A collection is read again when it has changed. Only the letters and digits of passages are held, up to a limit for each
tenant; what is beyond it is not found in messages, and the answer's notes say so.
"""

import logging
import threading
from pathlib import Path

from ragkv.dialogue import PassageMatcher, key_of
from ragkv.errors import StoreError
from ragkv.retrieval import state_of

from .collection_folders import CollectionFolders

log = logging.getLogger(__name__)


class KnownPassages:
    """Keeps a matcher true to the collections of one tenant. Thread-safe."""

    def __init__(self, folders: CollectionFolders, matcher: PassageMatcher, limit_chars: int) -> None:
        self._folders, self._matcher, self._limit = folders, matcher, limit_chars
        self._lock = threading.Lock()
        self._states: dict[Path, object] = {}  # by collection: the state of its index when it was read
        self._keys: dict[Path, frozenset[str]] = {}  # by collection: its known passages
        self._left: dict[Path, int] = {}  # by collection: its passages beyond the limit

    def refresh(self) -> tuple[str, ...]:
        """Read the collections that have changed. Returns a note if passages are left out."""
        with self._lock:
            self._refresh()
            left = sum(self._left.values())
        note = f"{left} passages are not looked for in messages: limits.known_chars is {self._limit}"
        return (note,) if left else ()

    def _refresh(self) -> None:
        paths = {key.path for name in self._folders.names() if (key := self._folders.key(name)) is not None}
        states = {path: state_of(path) for path in paths}
        for path in (self._keys.keys() | self._states.keys()) - paths:
            self._states.pop(path, None)
            self._left.pop(path, None)
            self._forget(self._keys.pop(path, frozenset()))
        for path in paths:
            if states[path] is not None and states[path] != self._states.get(path):
                try:
                    self._read(path)
                except StoreError:
                    log.exception("passages_not_read")
                self._states[path] = states[path]

    def _read(self, path: Path) -> None:
        """Know the passages that a collection has now, and forget those that it had."""
        keys, new, left, chars = set[str](), dict[str, str](), 0, self._matcher.chars
        before = self._keys.get(path, frozenset())
        for text in self._folders.texts(path):
            key = key_of(text)
            if key in before or key in keys:
                keys.add(key)
            elif chars + len(key) <= self._limit:
                chars += len(key)
                keys.add(key)
                new[key] = text
            else:
                left += 1
        self._matcher.add(new.values())
        self._keys[path], self._left[path] = frozenset(keys), left
        self._forget(before - keys)

    def _forget(self, keys: frozenset[str] | set[str]) -> None:
        """Forget the passages that no collection has any more."""
        held = frozenset[str]().union(*self._keys.values())
        self._matcher.discard(keys - held)
