"""Durable changes of files and folders."""

import os
import uuid
from pathlib import Path


def replace_file(path: Path, data: bytes) -> None:
    """Write `data` to `path`, durably and readable only by its owner. After a crash the file is the old or the new one.

    Raises `OSError`; the old file then stays as it was.
    """
    draft = path.with_name(f"{path.name}.{uuid.uuid4().hex}.tmp")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
    sync(path.parent)


def sync(path: Path) -> None:
    """Make the contents of a file durable, or the names in a folder. Raises `OSError`."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


__all__ = ["replace_file", "sync"]
