"""What a search finds: passages of documents, and how they are read from an index.

A passage's text is exactly the document's text at its span. No title, rank or score is ever put
into it, because the KV of a chunk is stored under the text.
"""

import json
from collections import ChainMap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from ragkv.types import brief

from .index_file import IndexFile, as_json

Metadata = Mapping[str, Any]  # JSON values


@dataclass(frozen=True, slots=True)
class Passage:
    """A piece of a document: retrieved, cited, and encoded as one chunk."""

    # a digest of the document id, the text and how often the text occurred before in the document
    id: str
    document_id: str
    text: str
    span: tuple[int, int]  # start, end: character offsets in the document's text
    source: str = ""  # the document's
    # the document's, with `page` and `section` if known
    metadata: Metadata = field(default_factory=dict, hash=False)
    page: int | None = None  # where it begins, from 1, if the format has pages
    section: str | None = None  # the headings above it, as in "Guide > Install"
    __repr__ = brief


def with_place(metadata: Metadata, page: int | None, section: str | None) -> Metadata:
    """A passage's metadata: a view of its document's, which all passages share, with its own page
    and section.
    """
    own = {
        name: value for name, value in (("page", page), ("section", section)) if value is not None
    }
    return ChainMap(own, cast(dict[str, Any], metadata)) if own else metadata


@dataclass(frozen=True, slots=True)
class Hit:
    """A passage that a search found: of several with the same text the first."""

    passage: Passage
    score: float  # comparable within one search only
    rank: int  # 1 is best


def read_passages(
    file: IndexFile, condition: str, parameters: Sequence[Any]
) -> Iterator[tuple[int, Passage]]:
    """The passages that meet an SQL `condition`, each with the number of its text. Those of one
    document share its source and metadata.
    """
    rows = file.rows(
        "SELECT text_number, passages.id, document_id, text, span_start, span_end, page, section "
        f"FROM passages JOIN texts ON number = text_number WHERE {condition}",
        parameters,
    )
    documents = file.rows(
        "SELECT id, source, metadata FROM documents WHERE id IN (SELECT value FROM json_each(?))",
        (as_json(list({row[2] for row in rows})),),
    )
    shared = {name: (source, json.loads(metadata)) for name, source, metadata in documents}
    for number, passage_id, document_id, text, start, end, page, section in rows:
        source, metadata = shared[document_id]
        place = ((start, end), source, with_place(metadata, page, section), page, section)
        yield number, Passage(passage_id, document_id, text, *place)
