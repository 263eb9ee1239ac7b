"""Durable changes of files and folders."""

import contextlib
import os
import stat
import uuid
from pathlib import Path


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


def sync(path: Path) -> None:
    """Make the contents of a file durable, or the names in a folder. Raises `OSError`."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
