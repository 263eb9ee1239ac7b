"""Reads files and folders into documents of the index. Every file has an outcome, and a bad file
does not stop the others.

Each file is committed with a record of its size, time and hash in one transaction. After a kill the
next run does not parse the finished files again, only the one that was being read.
"""

import hashlib
import itertools
import logging
import os
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from ragkv.errors import DocumentError, InputError, MissingExtraError
from ragkv.retrieval.documents.files import FoundFile, find_files, is_text_by_name, kind_of
from ragkv.retrieval.documents.formats import KNOWN
from ragkv.retrieval.documents.loaders import check_not_blank, load_bytes, read_bytes
from ragkv.retrieval.documents.reading import LOST, UNLIMITED, ParseLimits
from ragkv.retrieval.index import Index
from ragkv.retrieval.ingested import Document, FileRecord, IngestReport
from ragkv.retrieval.passages import Passage
from ragkv.runtime import counted

logger = logging.getLogger(__name__)

Progress = Callable[[int, int], None]  # done, total
FileStatus = Literal[
    "added", "changed", "moved", "unchanged", "gone", "ignored", "failed", "deleted"
]
Load = Callable[[Path, bytes, str | None, ParseLimits], Iterable[Document | DocumentError]]
# A higher `LOADER_VERSION` has files read again, when loaders make another text of them.
LOADER_VERSION = "5"
GONE = "its text stays in the index; delete it with --prune (in Python, FileOptions(prune=True))"
GONE_ELSEWHERE = f"{GONE}, and name its folder, too"
# A file that changed less than `SETTLED_NS` before it was read may change again at the same time.
SETTLED_NS = 2_000_000_000


@dataclass(frozen=True, slots=True)
class FileOutcome:
    """What became of a file, or of a folder that was not read."""

    path: str  # printable: bytes that are not UTF-8 are shown as escapes
    status: FileStatus
    # why it was ignored or failed; of a file that was read, what of it could not be, or under which
    # other name it is known
    reason: str = ""
    documents: tuple[str, ...] = ()  # ids, also of those that were read before the file failed


@dataclass(frozen=True, slots=True)
class FileProgress:
    """How far an ingestion of files is. Reported before and after each file."""

    files: int  # done
    files_total: int
    outcome: FileOutcome | None = None  # of the file that is done now
    path: str = ""  # the file that is read next


@dataclass(frozen=True, slots=True)
class FileOptions:
    """How files are read."""

    # overrules what files declare; "auto": guessed where they declare none
    encoding: str | None = None
    prune: bool = False  # delete the documents of files that are gone from the given folders
    limits: ParseLimits = UNLIMITED
    load: Load | None = None  # `load_bytes`, or that of a `LoneParser` with its limits
    on_file: Callable[[FileProgress], None] | None = None
    on_indexed: Callable[[], None] | None = None  # questions find all passages by their words now
    on_embed: Progress | None = None


class FileReader:
    """Brings one index up to date with files, once, and holds the outcomes of this run and what it
    changed.

    What a file held that fails now is never deleted.
    """

    def __init__(
        self,
        index: Index,
        forget: Callable[[Iterable[Passage]], int],
        options: FileOptions,
        method: str,
    ) -> None:
        """`forget` deletes the KV of passages; `method` changes when the same file would be split
        differently.
        """
        self._index = index
        self._forget = forget
        self._options = options
        self._method = f"{LOADER_VERSION}:{options.encoding}:{method}"
        # the real path of each file that is known under a name with a link in it -> this name;
        # `None` before the first new file
        self._linked: dict[str, str] | None = None
        self._gone: dict[str, list[str]] = {}  # digest of files that are gone -> their paths
        # folders that are gone, whose files were found elsewhere
        self._moved_from: set[Path] = set()
        self.outcomes: list[FileOutcome] = []
        self.reports: list[IngestReport] = []
        self.deleted_entries = 0

    @property
    def documents(self) -> list[str]:
        """The ids of all documents of the files, in order."""
        return list(dict.fromkeys(name for outcome in self.outcomes for name in outcome.documents))

    def run(self, paths: Sequence[str | Path]) -> None:
        """Read the files that changed."""
        # one name a file
        paths = [Path(path).resolve() if ".." in Path(path).parts else Path(path) for path in paths]
        known = self._index.writer.file_digests()
        found = find_files(
            path for path in paths if not (is_gone(path) and _has_below(path, known))
        )
        named = {Path(path).absolute() for path in paths}
        for done, file in enumerate(found):
            self._report(FileProgress(done, len(found), path=printable(file.path)))
            outcome = self._outcome(file, is_named=file.path.absolute() in named)
            self.outcomes.append(outcome)
            if outcome.status == "failed":
                logger.warning("%s", outcome.reason)
            self._report(FileProgress(done + 1, len(found), outcome))
        self._tell_missing(paths, found)

    def _look_at_known(self) -> dict[str, str]:
        """Find out which of the files that are in the index are links, or are gone."""
        linked = dict[str, str]()
        for path, digest in self._index.writer.file_digests().items():
            real = os.path.realpath(path)
            if is_gone(path):
                self._gone.setdefault(digest, []).append(path)
            elif real != path:
                linked[real] = path
        return linked

    def _report(self, progress: FileProgress) -> None:
        if self._options.on_file is not None:
            self._options.on_file(progress)

    def _changed(self, report: IngestReport) -> None:
        """Note a change of the index, and delete the KV that it leaves unused."""
        self.reports.append(report)
        self.deleted_entries += self._forget(report.forgotten_passages)

    def _known(self, path: Path) -> FileRecord | None:
        """What is known of a file whose documents are still there."""
        with suppress(UnicodeEncodeError):
            record = self._index.writer.file_record(str(path.absolute()))
            documents = {} if record is None else record.documents
            return (
                record
                if documents and self._index.contents.document_hashes(documents) == documents
                else None
            )
        return None

    def _outcome(self, file: FoundFile, is_named: bool) -> FileOutcome:
        """The outcome of a file. Where its text is still here although it cannot be read any more,
        this is told.
        """
        outcome = self._outcome_now(file, is_named)
        if (
            outcome.status not in ("ignored", "failed")
            or outcome.documents
            or self._known(file.path) is None
        ):
            return outcome
        now = (
            outcome.reason
            if outcome.status == "failed"
            else f"{outcome.path} is ignored now: {outcome.reason}."
        )
        return replace(
            outcome, status="failed", reason=f"{now} What it held before stays in the index."
        )

    def _outcome_now(self, file: FoundFile, is_named: bool) -> FileOutcome:
        shown = printable(file.path)
        if file.fate != "read":
            return FileOutcome(
                shown,
                file.fate,
                f"{shown} {file.reason}." if file.fate == "failed" else file.reason,
            )
        try:
            str(file.path).encode()
            return self._read(self._known_name(file.path), shown, is_named)
        except UnicodeEncodeError:
            return FileOutcome(
                shown, "failed", f"The name of {shown} is not UTF-8. Rename the file."
            )
        except MissingExtraError as error:
            return FileOutcome(shown, "failed" if is_named else "ignored", str(error))
        except OSError as error:
            return FileOutcome(shown, "failed", f"Cannot read {shown}: {error.strerror or error}.")
        except (DocumentError, InputError) as error:
            if not is_named and not kind_of(file.path) and not is_text_by_name(file.path):
                return FileOutcome(shown, "ignored", "no loader for a name without an ending")
            return FileOutcome(shown, "failed", printable(str(error)))

    def _known_name(self, path: Path) -> Path:
        """The name under which a file is in the index: a link to it is no second copy."""
        if self._index.writer.file_record(str(path.absolute())) is not None:
            return path
        real = os.path.realpath(path)
        if self._index.writer.file_record(real) is not None:
            return Path(real)
        if self._linked is None:
            self._linked = self._look_at_known()
        return Path(self._linked.get(real, path))

    def _read(self, path: Path, shown: str, is_named: bool) -> FileOutcome:
        """Read one file and put its documents, unless it is unchanged."""
        known = self._known(path)
        if known is not None and known.method != self._method:  # it would be split otherwise now
            known = None
        if path.is_file():
            now = path.stat()
            is_same = known is not None and (known.size, known.mtime_ns) == (
                now.st_size,
                now.st_mtime_ns,
            )
            if known is not None and is_same and os.access(path, os.R_OK):
                return self._unchanged(known, shown)
            self._options.limits.check("inflated_bytes", now.st_size, f"{shown}: its size in bytes")
        read_ns = time.time_ns()
        data = read_bytes(path)
        if not is_named and not data.strip():
            return FileOutcome(shown, "ignored", "empty")
        check_not_blank(path, data)
        record = self._record_of(path, data, read_ns)
        if known is not None and known.digest == record.digest:
            self._index.writer.put_file(replace(record, documents=known.documents))
            return self._unchanged(known, shown)
        return self._put(path, shown, data, record)

    def _record_of(self, path: Path, data: bytes, read_ns: int) -> FileRecord:
        modified_ns = path.stat().st_mtime_ns
        settled = read_ns - modified_ns > SETTLED_NS
        digest = hashlib.blake2b(data, digest_size=16).hexdigest()
        return FileRecord(
            str(path.absolute()), len(data), modified_ns if settled else 0, digest, self._method
        )

    def _unchanged(self, record: FileRecord, shown: str) -> FileOutcome:
        is_own = str(Path(shown).absolute()) == printable(record.path)
        reason = "" if is_own else f"a link to {record.path}"
        return FileOutcome(shown, "unchanged", printable(reason), tuple(record.documents))

    def _put(self, path: Path, shown: str, data: bytes, record: FileRecord) -> FileOutcome:
        load = self._options.load or load_bytes
        loaded = list(load(path, data, self._options.encoding, self._options.limits))
        documents = [one for one in loaded if isinstance(one, Document)]
        errors = [str(one) for one in loaded if isinstance(one, DocumentError)]
        report = self._index.writer.ingest(documents, file=None if errors else record, embed=False)
        self._changed(report)
        ids = tuple(dict.fromkeys(document.id for document in documents))
        if errors:
            more = f" And {counted(len(errors) - 1, 'more error')}." if len(errors) > 1 else ""
            read = f"Read of it: {counted(len(ids), 'document')}."
            return FileOutcome(shown, "failed", printable(f"{errors[0]}{more} {read}"), ids)
        lost = "; ".join(loss for document in documents for loss in document.metadata.get(LOST, ()))
        reason = f"not read: {lost}" if lost else ""
        is_changed = report.changed or report.deleted
        status: FileStatus = "changed" if is_changed else "added" if report.added else "unchanged"
        if status == "added" and (places := self._gone.get(record.digest)):
            old = max(places, key=lambda place: _shared_end(place, record.path))
            places.remove(old)
            self._moved_from.update(_moved_folder(old, record.path))
            # The texts are in the index under the new name, so no KV is deleted with the old one.
            self._changed(self._index.writer.delete_file(old))
            status = "moved"
            reason = "; ".join(filter(None, (f"it was {old}", reason)))
        return FileOutcome(shown, status, printable(reason), ids)

    def _tell_missing(self, paths: Sequence[str | Path], found: Sequence[FoundFile]) -> None:
        """Tell which files are gone from the folders. If it is asked for, delete their documents,
        and keep those of files that are there and were not read.
        """
        folders = {Path(path).absolute() for path in paths}
        folders |= {Path(os.path.realpath(folder)) for folder in folders}
        gone = 0
        for known in self._index.writer.file_digests():
            if not is_gone(known):
                continue
            above = {Path(known), *Path(known).parents, *Path(os.path.realpath(known)).parents}
            is_named = not folders.isdisjoint(above)
            if not is_named and self._moved_from.isdisjoint(above):
                continue
            if self._options.prune and is_named:
                self._changed(self._index.writer.delete_file(known))
                outcome = FileOutcome(printable(known), "deleted")
            else:
                reason = GONE if is_named else GONE_ELSEWHERE
                outcome = FileOutcome(printable(known), "gone", reason)
                gone += 1
            self.outcomes.append(outcome)
            self._report(FileProgress(len(found), len(found), outcome))
        if gone:
            logger.warning("%s are gone, and their text stays: %s", counted(gone, "file"), GONE)


def is_gone(path: str | Path) -> bool:
    """Whether nothing is at `path`. Of a folder that may not be read nothing is known."""
    try:
        os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return True
    except (OSError, ValueError):
        return False
    return False


def _has_below(path: str | Path, known: Iterable[str]) -> bool:
    """Whether one of the `known` files is `path`, or was below it."""
    own = str(Path(path).absolute())
    return any(file == own or file.startswith(f"{own}{os.sep}") for file in known)


def _shared_end(one: str, other: str) -> int:
    """How many names two paths share, from their ends."""
    pairs = zip(reversed(Path(one).parts), reversed(Path(other).parts), strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


def _moved_folder(old: str, new: str) -> Iterable[Path]:
    """The folder that was moved with a file, if it is gone from its old place."""
    shared = _shared_end(old, new)
    folder = Path(*Path(old).parts[: len(Path(old).parts) - shared])
    return [folder] if shared and is_gone(folder) else []


def printable(path: str | Path) -> str:
    """A path as text that can be printed: bytes that are not UTF-8 become escapes, as do control
    characters.
    """
    text = str(path).encode("utf-8", "backslashreplace").decode()
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode() for char in text
    )


def nothing_read(paths: Iterable[str | Path], outcomes: Sequence[FileOutcome]) -> str | None:
    """What to say if no file could be read; `None` if one could."""
    if any(
        outcome.status in ("added", "changed", "moved", "unchanged", "deleted") or outcome.documents
        for outcome in outcomes
    ):
        return None
    failed = [outcome.reason for outcome in outcomes if outcome.status == "failed"]
    if failed:
        more = f" {counted(len(failed) - 1, 'more file')} failed." if len(failed) > 1 else ""
        return f"{failed[0]}{more}"
    where = ", ".join(map(printable, paths))
    if any(outcome.status == "gone" for outcome in outcomes):
        return f"All files of {where} are gone; {GONE}."
    return f"No documents in {where}. Known: {KNOWN}."
