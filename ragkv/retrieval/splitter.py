"""Splits documents into passages of a counted number of tokens. It counts by a callable and knows no tokenizer.

langchain-text-splitters chooses where to cut. The spans are computed here, because its own start index mixes tokens and
characters when lengths are counted in tokens. Invariant: `document.text[start:end] == passage.text`, always.
"""

import bisect
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import PurePath
from typing import Any

from ragkv.errors import ConfigError
from ragkv.runtime import Check, no_check

from .values import Document, Passage, digest

# Where to cut, best first: regexes whose match begins the next passage (white space is then stripped from it).
PLAIN = (r"\n\s*\n", r"\n", r"(?<=[.!?])\s+", r"(?<=[。！？；])", r"\s+", "")
MARKDOWN = (r"\n(?=# )", r"\n(?=## )", r"\n(?=#{3,6} )", r"\n(?=(?:```|~~~))", *PLAIN)


@dataclass(frozen=True, slots=True)
class Splitter:
    """Cuts documents into passages of at most `tokens` tokens, at headings, paragraphs, lines, sentences or words.

    Headings are looked for in Markdown only: by the source's suffix, or by `metadata["format"] == "markdown"`.
    """

    count_tokens: Callable[[str], int] = field(repr=False)  # tokens of a text, without special tokens
    tokens: int = 512  # most tokens of a passage
    overlap_tokens: int = 0  # tokens shared with the passage before; the KV of shared text is stored twice
    tokenizer_id: str = ""  # names the tokenizer: documents are split again when it changes

    def __post_init__(self) -> None:
        if self.tokens < 1:
            raise ConfigError(f"tokens is {self.tokens}; a passage needs at least 1.")
        if not 0 <= self.overlap_tokens < self.tokens:
            raise ConfigError(f"overlap_tokens is {self.overlap_tokens}; it must lie in [0, {self.tokens}).")

    @property
    def fingerprint(self) -> str:
        """Changes when the same document would be split differently."""
        return f"recursive-1:{self.tokens}:{self.overlap_tokens}:{self.tokenizer_id}"

    def split(self, document: Document, check: Check = no_check) -> list[Passage]:
        """The passages of `document`, in order; none if it is blank. What `check` raises ends the splitting."""
        markdown = _is_markdown(document)
        headings = list(_headings(document.text)) if markdown else []
        occurrences: Counter[str] = Counter()
        passages = []
        for start, end in self._spans(document.text, MARKDOWN if markdown else PLAIN, check):
            text = document.text[start:end]
            passage_id = digest(document.id, text, str(occurrences[text]))
            occurrences[text] += 1
            metadata = {**document.metadata, **_location(document, headings, start)}
            passages.append(Passage(passage_id, document.id, text, (start, end), document.source, metadata))
        return passages

    def _spans(self, text: str, separators: tuple[str, ...], check: Check) -> Iterator[tuple[int, int]]:
        from langchain_text_splitters import RecursiveCharacterTextSplitter  # takes half a second

        @lru_cache(maxsize=1 << 16)  # the library counts the same words over and over
        def count(piece: str) -> int:
            check()
            return self.count_tokens(piece) if piece else 0

        size = self.tokens - self.overlap_tokens
        cutter = RecursiveCharacterTextSplitter(
            separators=list(separators),
            is_separator_regex=True,
            keep_separator="start",
            chunk_size=size,
            chunk_overlap=0,
            length_function=count,
        )
        masked = _mask_code_comments(text) if separators is MARKDOWN else text
        previous = end = 0
        for piece in cutter.split_text(masked):
            start = masked.index(piece, end)
            end = start + len(piece)
            for begin, stop in _halve_until_it_fits(text, start, end, count, size):
                yield self._start_with_overlap(text, previous, begin, stop, count), stop
                previous = begin

    def _start_with_overlap(self, text: str, previous: int, start: int, end: int, count: Callable[[str], int]) -> int:
        """The start of the passage, moved back by up to `overlap_tokens` tokens of whole words."""
        best = start
        for word in reversed(list(re.finditer(r"\S+", text[previous:start]))) if self.overlap_tokens else ():
            begin = previous + word.start()
            if count(text[begin:start]) > self.overlap_tokens or count(text[begin:end]) > self.tokens:
                break
            best = begin
        return best


def _halve_until_it_fits(
    text: str, start: int, end: int, count: Callable[[str], int], tokens: int
) -> Iterator[tuple[int, int]]:
    """The span, halved if needed: joined pieces may have a few more tokens than the sum of their counts."""
    if end - start <= 1 or count(text[start:end]) <= tokens:
        if text[start:end].strip():
            yield start, end
        return
    middle = (start + end) // 2
    space = max(text.rfind(" ", start + 1, middle + 1), text.rfind("\n", start + 1, middle + 1))
    cut = space if space > start else middle
    yield from _halve_until_it_fits(text, start, cut, count, tokens)
    right = cut
    while right < end - 1 and text[right].isspace():
        right += 1
    yield from _halve_until_it_fits(text, right, end, count, tokens)


def _is_markdown(document: Document) -> bool:
    declared = document.metadata.get("format")
    return declared == "markdown" if declared else PurePath(document.source).suffix.lower() in (".md", ".markdown")


def _lines(text: str) -> Iterator[tuple[int, str, bool]]:
    """The offset and content of each line, and whether it is fenced code."""
    fence = ""
    offset = 0
    for line in text.split("\n"):
        mark = re.match(r" {0,3}(`{3,}|~{3,})", line)
        if mark and not fence:
            fence = mark.group(1)
        elif mark and mark.group(1).startswith(fence):
            fence = ""
        yield offset, line, bool(fence)
        offset += len(line) + 1


def _headings(text: str) -> Iterator[tuple[int, int, str]]:
    """The offset, level and title of each ATX heading."""
    for offset, line, code in _lines(text):
        if not code and (heading := re.match(r"(#{1,6}) +(.+?)(?: +#+)? *$", line)):
            yield offset, len(heading.group(1)), heading.group(2)


def _mask_code_comments(text: str) -> str:
    """A text of equal length in which no line of code looks like a heading."""
    return "\n".join("%" + line[1:] if code and line.startswith("#") else line for _, line, code in _lines(text))


def _location(document: Document, headings: list[tuple[int, int, str]], start: int) -> dict[str, Any]:
    """The `page` (from 1) and `section` ("Guide > Install") of a passage that begins at `start`, for citations."""
    location: dict[str, Any] = {}
    if document.page_starts:
        location["page"] = bisect.bisect_right(document.page_starts, start)
    path: list[tuple[int, str]] = []
    for offset, level, title in headings:
        if offset > start:
            break
        path = [(above, name) for above, name in path if above < level] + [(level, title)]
    if path:
        location["section"] = " > ".join(name for _, name in path)
    return location
