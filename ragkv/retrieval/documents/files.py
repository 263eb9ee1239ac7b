"""Finds the files in folders. Every file seen is either to be read, ignored or failed, with the
reason.
"""

import os
import re
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from .formats import FORMATS

# The names of files without an ending that are text by custom.
_TEXT_NAMES = "readme license licence notice copying authors changelog changes makefile dockerfile"
MARKDOWN = frozenset({".md", ".markdown", ".mdx", ".rmd", ".qmd"})
# An ending is a word: "notes.2024" and "Dr. Reed" have none.
_ENDING = re.compile(r"\.[a-z][a-z0-9_+-]{0,15}")
_LINK = "a link; name it to read it"


@dataclass(frozen=True, slots=True)
class FoundFile:
    """A file that was seen, or a folder that is not read."""

    path: Path
    fate: Literal["read", "ignored", "failed"]
    reason: str = ""  # why it is not read


def find_files(paths: Iterable[str | Path]) -> list[FoundFile]:
    """Every file of `paths` once, folders recursively and sorted. A path that is given itself is
    always to be read.

    In a folder a file is read if it has a loader. A hidden folder is one entry, and is not entered.
    Links in a folder are not followed: they lead in circles, or to what was not named.
    """
    found: dict[Path, FoundFile] = {}
    for path in map(Path, paths):
        is_folder = os.path.isdir(path)  # noqa: PTH112 - unlike Path.is_dir it raises nothing
        for entry in (
            sorted(_walk(path), key=lambda one: one.path)
            if is_folder
            else [FoundFile(path, "read")]
        ):
            key = entry.path.absolute()
            if key not in found or found[key].fate != "read":
                found[key] = entry
    return list(found.values())


def has_loader(file: Path) -> bool:
    """Whether a file is read, by its name alone. One without an ending is, if it is text."""
    kind = kind_of(file)
    return not kind or kind in FORMATS


def kind_of(file: Path) -> str:
    """The ending of a file, in small letters; "" if it has none."""
    suffix = file.suffix.lower()
    return suffix if _ENDING.fullmatch(suffix) else ""


def is_text_by_name(file: Path) -> bool:
    """Whether a file without an ending is text by custom."""
    return file.name.lower() in _TEXT_NAMES.split()


def _walk(root: Path) -> Iterator[FoundFile]:
    errors: list[OSError] = []
    for folder, inner, names in os.walk(root, onerror=errors.append):
        for path in [Path(folder, name) for name in inner]:
            if path.name.startswith(".") or path.is_symlink():
                inner.remove(path.name)
                yield FoundFile(
                    path, "ignored", "a hidden folder" if path.name.startswith(".") else _LINK
                )
        yield from (_file(Path(folder, name)) for name in names)
    for error in errors:
        why = f"cannot be listed: {error.strerror}. Check its permissions"
        yield FoundFile(Path(error.filename), "failed", why)


def _file(file: Path) -> FoundFile:
    """A file in a folder."""
    if file.name.startswith("."):
        return FoundFile(file, "ignored", "a hidden file")
    if file.name.startswith("~$"):
        return FoundFile(file, "ignored", "a lock file of Office, which has the document open")
    try:
        found = file.stat()
    except OSError as error:
        why = (
            f"cannot be read: {error.strerror}. Check its permissions, and where it leads if "
            "it is a link"
        )
        return FoundFile(file, "failed", why)
    if not stat.S_ISREG(found.st_mode):
        return FoundFile(file, "ignored", "no regular file")
    if not has_loader(file):
        return FoundFile(file, "ignored", f"no loader for {file.suffix}")
    if file.is_symlink():
        return FoundFile(file, "ignored", _LINK)
    return FoundFile(file, "read") if found.st_size else FoundFile(file, "ignored", "empty")
