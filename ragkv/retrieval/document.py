"""What retrieval speaks of: documents come in, passages lie in the index, hits come out. Values only.

A passage's text is exactly the document's text at its span: no title, rank or score is ever put into it, because the
text is what a chunk's KV is keyed by.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ragkv.errors import DocumentError

Metadata = Mapping[str, Any]  # what JSON can hold


@dataclass(frozen=True, slots=True)
class Document:
    """One text to be indexed, as a loader read it or a caller made it."""

    id: str  # stable: the file's absolute path, the id in a JSON line, or the caller's
    text: str
    source: str = ""  # where it came from, for people
    metadata: Metadata = field(default_factory=dict, hash=False)
    page_starts: tuple[int, ...] = ()  # offset of each page in `text`, where the format has pages

    def content_hash(self, salt: str = "") -> str:
        """Changes when anything that could change the index does; `salt` stands for how the text is split."""
        try:
            metadata = json.dumps(self.metadata, sort_keys=True, ensure_ascii=False, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise DocumentError(f"Metadata of document {self.id!r} is not JSON: {error}. Use JSON values.") from error
        try:
            return digest(salt, self.id, self.source, metadata, ",".join(map(str, self.page_starts)), self.text)
        except UnicodeEncodeError as error:
            half = error.object[error.start]
            raise DocumentError(f"Document {self.id!r} holds {half!r}, half a character. Decode it rightly.") from error


@dataclass(frozen=True, slots=True)
class Passage:
    """A piece of a document: what is retrieved, cited, and encoded as one chunk."""

    id: str  # from document id, text and (for a text that repeats) its place among the repeats
    document_id: str
    text: str
    span: tuple[int, int]  # start, end: character offsets in the document's text
    source: str = ""  # the document's
    metadata: Metadata = field(default_factory=dict, hash=False)  # the document's, and `page` and `section` if known


@dataclass(frozen=True, slots=True)
class Hit:
    """A passage that was found."""

    passage: Passage
    score: float  # comparable within one search only
    rank: int  # 1 is best
    duplicates: tuple[Passage, ...] = ()  # further passages of exactly this text, in other places


def digest(*parts: str) -> str:
    """A stable content hash of some strings (blake2b, 32 hex digits); where one part ends is part of it."""
    state = hashlib.blake2b(digest_size=16)
    for part in parts:
        data = part.encode()
        state.update(len(data).to_bytes(8, "little"))
        state.update(data)
    return state.hexdigest()
