"""What is ingested and listed: documents, the files that they came from, and reports."""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from ragkv.errors import DocumentError
from ragkv.runtime.outside import check_kind
from ragkv.types import brief

from .passages import Metadata, Passage

# A NUL in JSON: it stands after an even number of backslashes.
_NUL = re.compile(r"(?<!\\)(?:\\\\)*\\u0000")


@dataclass(frozen=True, slots=True)
class Document:
    """One text to index, read by a loader or made by the caller."""

    id: str  # stable: the file's absolute path, the id in a JSON line, or the caller's own
    text: str
    source: str = ""  # where it came from, shown to people
    metadata: Metadata = field(default_factory=dict, hash=False)
    page_starts: tuple[int, ...] = ()  # offset of each page in `text`, where the format has pages
    __repr__ = brief

    def content_hash(self, salt: str = "") -> str:
        """A hash of everything that affects the index. `salt` stands for the way the text is split.

        Raises `DocumentError` if the metadata is not JSON, or if a string holds NUL or half a
        surrogate pair.
        """
        check_kind("A document's id", self.id, str)
        check_kind(f"The text of document {self.id!r}", self.text, str)
        try:
            metadata = json.dumps(
                self.metadata, sort_keys=True, ensure_ascii=False, allow_nan=False
            )
        except (TypeError, ValueError) as error:
            raise DocumentError(
                f"Metadata of document {self.id!r} is not JSON: {error}. Use JSON values."
            ) from error
        if _NUL.search(metadata) or "\0" in f"{self.id}{self.source}{self.text}":
            raise DocumentError(
                f"Document {self.id!r} or its metadata holds NUL, where SQLite ends a text. "
                "Remove it."
            )
        try:
            return digest(
                salt,
                self.id,
                self.source,
                metadata,
                ",".join(map(str, self.page_starts)),
                self.text,
            )
        except UnicodeEncodeError as error:
            half = error.object[error.start]
            message = (
                f"Document {self.id!r} holds {half!r}, half a character. Decode it with "
                "the right encoding."
            )
            raise DocumentError(message) from error


@dataclass(frozen=True, slots=True)
class DocumentSummary:
    """What is listed of a document."""

    id: str
    source: str
    metadata: Metadata
    characters: int
    passages: int
    position: int  # higher for documents that were stored later


@dataclass(frozen=True, slots=True)
class FileRecord:
    """What an index knows of a file that it has read, to tell whether the file must be
    read again.
    """

    path: str  # absolute
    size: int
    mtime_ns: int  # 0: it had changed so shortly before that a later change may have the same time
    digest: str  # of its bytes
    method: str  # how it was decoded and split
    # the hash of each of its documents, by id
    documents: Mapping[str, str] = field(default_factory=dict, hash=False)


@dataclass(frozen=True, slots=True)
class IngestReport:
    """What an ingestion or a deletion changed. Document ids are in order of appearance."""

    added: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()
    unchanged: tuple[str, ...] = ()
    deleted: tuple[str, ...] = ()  # the ids that were there
    removed_passages: tuple[Passage, ...] = ()  # of changed and deleted documents
    # the removed ones whose text no document holds any more
    forgotten_passages: tuple[Passage, ...] = ()
    embedded_texts: int = 0  # distinct texts sent to the embedder
    __repr__ = brief


@dataclass(frozen=True, slots=True)
class IndexStats:
    """What an index holds."""

    documents: int
    passages: int
    texts: int  # distinct texts of passages
    embedded_texts: int  # distinct texts with vectors
    embedder: str | None  # the name of the embedder it was built with
    dimension: int | None


def digest(*parts: str) -> str:
    """A stable hash of some strings (blake2b, 32 hex digits). Lengths are hashed too: ("ab", "") is
    not ("a", "b").
    """
    state = hashlib.blake2b(digest_size=16)
    for part in parts:
        data = part.encode()
        state.update(len(data).to_bytes(8, "little"))
        state.update(data)
    return state.hexdigest()
