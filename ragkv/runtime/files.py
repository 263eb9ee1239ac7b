"""Files that this program writes: durable changes, and small JSON files that are read back.

A damaged file is moved aside, with a sentence in the log. So it is not read again, and its bytes
are not lost.
"""

import contextlib
import json
import logging
import os
import stat
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from ragkv.errors import RagKVError

log = logging.getLogger(__name__)

T = TypeVar("T")

# What reading a damaged file may raise: it is no JSON, is nested too deeply, or has other types.
DAMAGED = (
    ArithmeticError,
    AttributeError,
    LookupError,
    RagKVError,
    RecursionError,
    TypeError,
    ValueError,
)


def replace_file(
    path: Path, *pieces: bytes | bytearray | memoryview, drafts: Path | None = None
) -> None:
    """Write `pieces` to `path`, durably and readable only by its owner.

    The draft is written in the folder `drafts`, by default next to `path`, so after a crash the
    file is the old or the new one. Raises `OSError`; the old file then stays as it was.
    """
    draft = (drafts or path.parent) / f"{path.name}.{uuid.uuid4().hex}.tmp"
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        try:
            for piece in pieces:
                rest = memoryview(piece)
                while rest:  # the system may write less than it was given
                    rest = rest[os.write(descriptor, rest) :]
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        draft.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            draft.unlink()
        raise
    sync(path.parent)


def cache_folder(kind: str) -> Path:
    """The folder of one kind of what is kept for later: `ragkv/KIND` in the user's cache folder."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "ragkv" / kind


def make_private_folder(folder: Path) -> None:
    """Make a folder, and the missing ones above it, for their owner alone whatever the umask;
    existing ones stay.

    Raises `OSError`.
    """
    if folder.is_dir():
        return
    make_private_folder(folder.parent)
    try:
        folder.mkdir(mode=0o700)
    except FileExistsError:
        if not folder.is_dir():
            raise
    else:
        folder.chmod(0o700)


def only_owner_writes(*paths: Path) -> bool:
    """Whether files and folders are this user's or root's, and nobody else may write to them.
    Raises `OSError`.

    A symbolic link is whoever's can write where it leads, so it counts as another's.
    """
    found = [path.lstat() for path in paths]
    return all(
        one.st_uid in (0, os.geteuid())
        and not stat.S_ISLNK(one.st_mode)
        and not one.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
        for one in found
    )


def examples() -> Path | None:
    """The folder with the example articles and questions: in an installation, or in a checkout;
    `None`: in neither.
    """
    package = Path(__file__).parents[1]
    folders = (package / "examples", package.parent / "examples")
    return next((folder for folder in folders if (folder / "questions.jsonl").is_file()), None)


def is_missing(path: Path) -> bool:
    """Whether there surely is no such file. If that cannot be seen, a read of it says why."""
    try:
        return not path.exists()
    except OSError:
        return False


def sync(path: Path) -> None:
    """Make the contents of a file durable, or the names in a folder. Raises `OSError`."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def aside_of(path: Path) -> Path:
    """Where `read_own` moves a damaged file of that name."""
    return path.with_name(f"{path.name}.damaged")


def read_own(path: Path, parse: Callable[[Any], T]) -> T | None:
    """What `parse` makes of the JSON in `path`; `None` if there is no file, or if it is damaged.

    A damaged file is moved to `aside_of(path)`, so the next call finds no file. A caller that must
    not start without the old values looks there. `parse` raises one of `DAMAGED` for values that
    are wrong. Raises `OSError`.
    """
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    try:
        values = json.loads(data)
        json.dumps(values, ensure_ascii=False).encode()  # half a character is in no file of ours
        return parse(values)
    except DAMAGED as error:
        aside = aside_of(path)
        try:
            path.replace(aside)
        except OSError:
            aside = path  # the folder cannot be written
        log.warning("%s is damaged (%.200s). It is not used, and lies at %s.", path, error, aside)
        return None
