"""Reads an index that other processes may write or delete meanwhile."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

from ragkv.errors import StoreError
from ragkv.runtime import FileState, sqlite_files

from .index import Index
from .index_schema import FILE, NoIndexError


@contextmanager
def look_into(directory: Path) -> Iterator[Index | None]:
    """The index in `directory` for a few reads, while other processes may write it; `None` if there
    is none, or none yet.
    """
    try:
        index = Index(directory, read_only=True) if index_bytes(directory) else None
    except NoIndexError:
        index = None
    except StoreError:
        if index_bytes(directory):
            raise
        index = None  # another process has deleted it meanwhile
    with index or nullcontext() as found:
        yield found


def index_bytes(directory: Path) -> int:
    """How many bytes the index in `directory` takes; 0 if there is none."""
    try:
        return (directory / FILE).stat().st_size
    except OSError:
        return 0


def index_state(directory: Path) -> FileState | None:
    """A value that every transaction on the index in `directory` changes; `None` if there is
    none.
    """
    try:
        return sqlite_files.state_of(directory / FILE)
    except OSError:
        return None
