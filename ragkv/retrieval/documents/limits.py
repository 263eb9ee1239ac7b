"""Limits on what one file may make a loader do. A small file can hold much: a PDF whose pages share a stream."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ragkv.errors import DocumentLimitError


@dataclass(frozen=True, slots=True)
class ParseLimits:
    """How much a file may hold; `None`: any amount. Time and memory are limited by killing the process that parses."""

    document_chars: int | None = None  # characters of one document
    metadata_chars: int | None = None  # characters of one document's metadata, as JSON
    lines: int | None = None  # lines of a JSONL file, blank ones included
    nesting: int | None = None  # depth of JSON values, and of HTML elements whose text is dropped
    pages: int | None = None  # pages of a PDF
    inflated_bytes: int | None = None  # decompressed contents of all pages of a PDF; a shared stream counts each time

    def check(self, limit: str, amount: int, what: str) -> None:
        """Raise `DocumentLimitError` if `amount` is above the limit of that name. `what` says whose amount it is."""
        most: int | None = getattr(self, limit)
        if most is not None and amount > most:
            raise DocumentLimitError(f"{what} is above the limit of {most} ({limit})", limit)

    def check_text(self, name: str, text: str) -> None:
        """Raise `DocumentLimitError` if the text of the document `name` is too long."""
        self.check("document_chars", len(text), f"{name}: the number of characters")

    def check_metadata(self, name: str, metadata: Mapping[str, Any]) -> None:
        """Raise `DocumentLimitError` if the metadata of the document `name` is too deep or too long."""
        if self.nesting is not None:
            self.check("nesting", _depth(metadata, self.nesting + 1), f"{name}: the nesting of its metadata")
        if self.metadata_chars is not None:
            chars = len(json.dumps(metadata, ensure_ascii=False))
            self.check("metadata_chars", chars, f"{name}: the size of its metadata in characters")


def _depth(value: Any, enough: int) -> int:
    """How many objects and lists lie inside each other; counts no further than `enough`. Does not recurse."""
    level, depth = [value], 0
    while depth < enough:
        level = [item for one in level if isinstance(one, dict | list | tuple) for item in _items(one)]
        if not level:
            break
        depth += 1
    return depth


def _items(container: dict[str, Any] | list[Any] | tuple[Any, ...]) -> list[Any]:
    return list(container.values() if isinstance(container, dict) else container)


UNLIMITED = ParseLimits()
