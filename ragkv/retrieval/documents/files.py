"""Finds the files in folders. Every file seen is either to be read, ignored or failed, with the reason."""

import os
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal


@dataclass(frozen=True, slots=True)
class FoundFile:
    """A file that was seen, or a folder that is not read."""

    path: Path
    fate: Literal["read", "ignored", "failed"]
    reason: str = ""  # why it is not read


def find_files(paths: Iterable[str | Path], suffixes: Iterable[str], names: Iterable[str]) -> list[FoundFile]:
    """Every file of `paths` once, folders recursively and sorted. A path that is given itself is always to be read.

    In a folder a file is read if it ends in one of `suffixes` or is called one of `names`. A hidden folder is one
    entry, and is not entered. Links in a folder are not followed: they lead in circles, or to what was not named.
    """
    found: dict[Path, FoundFile] = {}
    rules = _Rules(frozenset(suffixes), frozenset(names))
    for path in map(Path, paths):
        entries = sorted(rules.walk(path), key=lambda entry: entry.path) if _is_folder(path) else [_given(path)]
        for entry in entries:
            key = entry.path.absolute()
            if key not in found or found[key].fate != "read":
                found[key] = entry
    return list(found.values())


@dataclass(frozen=True, slots=True)
class _Rules:
    suffixes: frozenset[str]
    names: frozenset[str]

    def walk(self, root: Path) -> Iterator[FoundFile]:
        errors: list[OSError] = []
        for folder, inner, names in os.walk(root, onerror=errors.append):
            for name in list(inner):
                if why := self._why_not_entered(Path(folder, name)):
                    inner.remove(name)
                    yield FoundFile(Path(folder, name), "ignored", why)
            for name in names:
                yield self._file(Path(folder, name), root)
        for error in errors:
            why = f"cannot be listed: {error.strerror}. Check its permissions"
            yield FoundFile(Path(error.filename), "failed", why)

    def _why_not_entered(self, folder: Path) -> str:
        if folder.name.startswith("."):
            return "a hidden folder"
        return "a link to a folder; name it to read it" if folder.is_symlink() else ""

    def _file(self, file: Path, root: Path) -> FoundFile:
        if file.name.startswith("."):
            return FoundFile(file, "ignored", "a hidden file")
        if file.name.startswith("~$"):
            return FoundFile(file, "ignored", "a lock file of Office, which has the document open")
        try:
            kind = file.stat()
        except FileNotFoundError:
            return FoundFile(file, "failed", "a link to a file that does not exist. Remove it, or restore the file")
        except OSError as error:
            return FoundFile(file, "failed", f"cannot be read: {error.strerror}. Check its permissions")
        if why := self._why_ignored(file, root, kind):
            return FoundFile(file, "ignored", why)
        return FoundFile(file, "read")

    def _why_ignored(self, file: Path, root: Path, kind: os.stat_result) -> str:
        if not stat.S_ISREG(kind.st_mode):
            return "no regular file"
        if not has_loader(file, self.suffixes, self.names):
            return f"no loader for {file.suffix}" if file.suffix else "no loader for a name without an ending"
        if kind.st_size == 0:
            return "empty"
        if not file.is_symlink():
            return ""
        target, folder = file.resolve(), root.resolve()
        if target.is_relative_to(folder):
            return f"a link to {target.relative_to(folder)} in the same folder"
        return "a link that leads out of the folder; name it to read it"


def _is_folder(path: Path) -> bool:
    try:
        return path.is_dir()
    except OSError:
        return False


def _given(path: Path) -> FoundFile:
    """A path that is given itself and no folder. What is wrong with it is said when it is read."""
    try:
        path.exists()
    except OSError as error:
        return FoundFile(path, "failed", f"cannot be read: {error.strerror}. Check its permissions")
    return FoundFile(path, "read")


def has_loader(file: Path, suffixes: Iterable[str], names: Iterable[str]) -> bool:
    """Whether a file is read, by its name alone."""
    return file.suffix.lower() in suffixes or (not file.suffix and file.name.lower() in names)
