"""Files that are replaced as a whole."""

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
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)  # makes the new name durable
    finally:
        os.close(folder)


__all__ = ["replace_file"]
