"""The folders of a tenant's collections: names, sizes, creation and deletion. Nothing stays open.

Listing reads little of each collection. Its sizes are read again only after it has changed. A
deleted collection's folder is renamed first, so that a kill in between leaves a folder that the
next start removes, and not half a collection.
"""

import contextlib
import json
import re
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from ragkv.retrieval import index_bytes, index_state, look_into
from ragkv.runtime import DAMAGED, make_private_folder, replace_file, sync

from ..bodies import resources as schemas
from ..errors import ApiError

COLLECTION_NAME = re.compile(schemas.NAME_PATTERN)
DEFAULT_COLLECTION = "default"  # `ragkv ingest` fills this one, where there are no tenants.
FACTS = "collection.json"
_DELETED = ".deleted-"  # The folders of deleted collections have this prefix.


class CollectionKey(NamedTuple):
    """What identifies a collection: one that is deleted and created again under its name is another
    one.
    """

    path: Path
    # seconds since the epoch; None: not known, as of the command line's index
    created: float | None


class CollectionFolders:
    """The folders of one tenant's collections."""

    def __init__(self, home: Path) -> None:
        """`home` is the tenant's directory."""
        self._home = home
        self._folder = home / "collections"
        self.lock = threading.RLock()  # held while a folder is created or renamed
        self._hidden: set[str] = set()  # names of collections whose deletion has begun
        # state of the index, its counts
        self._sizes: dict[Path, tuple[object, tuple[int, int]]] = {}

    def names(self) -> list[str]:
        """The names of all collections, sorted."""
        found = {name for name in self._folder_names() if COLLECTION_NAME.fullmatch(name)}
        found = {name for name in found if (self._folder / name / FACTS).is_file()}
        if self._command_line_index() is not None:
            found.add(DEFAULT_COLLECTION)
        for path in self._sizes.copy():
            if path.parent == self._folder and path.name not in found:  # another process deleted it
                self._sizes.pop(path, None)
        return sorted(found - self._hidden)

    def key(self, name: str) -> CollectionKey | None:
        """The collection of that name, `None` if there is none."""
        if not COLLECTION_NAME.fullmatch(name) or name in self._hidden:
            return None
        folder = self._folder / name
        if (folder / FACTS).is_file() and not folder.is_symlink():
            return CollectionKey(folder, _created(folder))
        index = self._command_line_index() if name == DEFAULT_COLLECTION else None
        return None if index is None else CollectionKey(index, None)

    def owns(self, key: CollectionKey) -> bool:
        """Whether it is a collection of this tenant, or was one."""
        return key.path.parent == self._folder or key.path == self._home / "index"

    def info(self, name: str) -> schemas.CollectionBody | None:
        """The collection as it is listed, `None` if there is none."""
        if (key := self.key(name)) is None:
            return None
        try:
            documents, chunks = self._size(key)
            created = key.path.stat().st_ctime if key.created is None else key.created
        except OSError:
            return None
        return schemas.CollectionBody(
            name=name, documents=documents, chunks=chunks, created=created
        )

    def infos(self) -> list[schemas.CollectionBody]:
        """All collections, by name."""
        return [info for info in map(self.info, self.names()) if info is not None]

    def size_bytes(self) -> int:
        """What all collections take on disk: documents, passages, terms and vectors."""
        return sum(
            index_bytes(key.path) for name in self.names() if (key := self.key(name)) is not None
        )

    def create(self, name: str, check: Callable[[int], None]) -> bool:
        """Create a collection unless it exists; whether it was created.

        `check` is called with the number of collections that exist, and raises if there may not be
        one more. Raises `ApiError` 409 while a collection of that name is being deleted.
        """
        with self.lock:
            if name in self._hidden:
                message = f"Collection {name!r} is being deleted. Ask again."
                raise ApiError(409, message, param="name", retry_after_s=1)
            if self.key(name) is not None:
                return False
            check(len(self.names()))
            path = self._folder / name
            make_private_folder(path)
            replace_file(
                path / FACTS, json.dumps({"name": name, "created": time.time()}).encode() + b"\n"
            )
            sync(self._folder)
            return True

    def hide(self, name: str) -> CollectionKey | None:
        """Find a collection for the last time, because it is deleted; `None` if there is none.
        `rename` must follow.
        """
        with self.lock:
            if (key := self.key(name)) is not None:
                self._hidden.add(name)
            return key

    def rename(self, name: str, key: CollectionKey) -> Path:
        """Rename the folder of a hidden collection, so that the name is free; returns the folder to
        erase.

        The collection must be closed: SQLite and snapshots would write to the old path.
        """
        renamed = self._folder / f"{_DELETED}{secrets.token_hex(8)}"
        with self.lock:
            self._hidden.discard(name)
            self._sizes.pop(key.path, None)
            make_private_folder(self._folder)
            with contextlib.suppress(FileNotFoundError):  # another process was faster
                key.path.rename(renamed)
        return renamed

    def leftovers(self) -> list[Path]:
        """The folders of collections whose deletion a kill interrupted."""
        return [self._folder / name for name in self._folder_names() if name.startswith(_DELETED)]

    def unheld(self, texts: Iterable[str], names: Iterable[str] | None = None) -> set[str]:
        """The texts among `texts` that none of the collections has as a passage. `names` left out:
        none of all collections.
        """
        left = set(texts)
        for name in (self.names() if names is None else names) if left else ():
            if left and (key := self.key(name)) is not None:
                with look_into(key.path) as index:
                    left -= index.contents.held(left) if index is not None else set()
        return left

    @staticmethod
    def texts(folder: Path) -> Iterator[str]:
        """The texts of all passages in a collection's folder."""
        with look_into(folder) as index:
            yield from (
                (passage.text for passage in index.contents.passages()) if index is not None else ()
            )

    def _size(self, key: CollectionKey) -> tuple[int, int]:
        """Documents and passages, read again if the index has changed since."""
        # before the counts: if they are newer, they are read once more than necessary
        state = index_state(key.path)
        known, size = self._sizes.get(key.path, (None, (0, 0)))
        if state != known:
            with look_into(key.path) as index:
                held = None if index is None else index.contents.stats()
            size = (0, 0) if held is None else (held.documents, held.passages)
            self._sizes[key.path] = state, size
        return size

    def _folder_names(self) -> list[str]:
        try:
            return [path.name for path in self._folder.iterdir() if not path.is_symlink()]
        except FileNotFoundError:
            return []

    def _command_line_index(self) -> Path | None:
        """The index that `ragkv ingest` fills; only the tenant without a name has one."""
        index = self._home / "index"
        if (self._folder / DEFAULT_COLLECTION).exists() or self._home.parent.name == "tenants":
            return None
        return index if index.is_dir() else None


def _created(folder: Path) -> float | None:
    """When the collection in `folder` was created; `None` if that cannot be read."""
    try:
        return float(json.loads((folder / FACTS).read_text(encoding="utf-8"))["created"])
    except (OSError, *DAMAGED):
        return None
