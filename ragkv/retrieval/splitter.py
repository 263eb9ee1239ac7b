"""Splitting documents into passages of a counted number of tokens. Counts through a callable: knows no tokenizer.

langchain-text-splitters chooses where to cut; the spans are found here, because its own start index mixes tokens and
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

from .document import Document, Passage, digest

# Where to cut, best first. Each is a regex whose match opens the next passage (and is then stripped from it).
PLAIN = (r"\n\s*\n", r"\n", r"(?<=[.!?])\s+", r"(?<=[。！？；])", r"\s+", "")
MARKDOWN = (r"\n(?=# )", r"\n(?=## )", r"\n(?=#{3,6} )", r"\n(?=(?:```|~~~))", *PLAIN)


@dataclass(frozen=True, slots=True)
class Splitter:
    """Cuts documents into passages of at most `tokens` tokens, at headings, paragraphs, lines, sentences, words.

    Headings count in Markdown: by the source's suffix, or by `metadata["format"] == "markdown"`.
    """

    count_tokens: Callable[[str], int] = field(repr=False)  # tokens of a text, without special tokens
    tokens: int = 512  # most tokens of a passage
    overlap_tokens: int = 0  # tokens a passage shares with the one before; the KV of shared text is stored twice
    tokenizer_id: str = ""  # names the tokenizer: documents are split anew when it changes

    def __post_init__(self) -> None:
        if self.tokens < 1:
            raise ConfigError(f"tokens is {self.tokens}; a passage needs at least 1.")
        if not 0 <= self.overlap_tokens < self.tokens:
            raise ConfigError(f"overlap_tokens is {self.overlap_tokens}; it must lie in [0, {self.tokens}).")

    @property
    def fingerprint(self) -> str:
        """Changes when the same document would be split otherwise."""
        return f"recursive-1:{self.tokens}:{self.overlap_tokens}:{self.tokenizer_id}"

    def split(self, document: Document) -> list[Passage]:
        """The passages of `document`, in order; none if it is blank."""
        markdown = _is_markdown(document)
        headings = list(_headings(document.text)) if markdown else []
        repeats: Counter[str] = Counter()
        passages = []
        for start, end in self._spans(document.text, MARKDOWN if markdown else PLAIN):
            text = document.text[start:end]
            identity = digest(document.id, text, str(repeats[text]))
            repeats[text] += 1
            metadata = {**document.metadata, **_place(document, headings, start)}
            passages.append(Passage(identity, document.id, text, (start, end), document.source, metadata))
        return passages

    def _spans(self, text: str, separators: tuple[str, ...]) -> Iterator[tuple[int, int]]:
        from langchain_text_splitters import RecursiveCharacterTextSplitter  # half a second

        @lru_cache(maxsize=1 << 16)  # the library counts the same words over and over
        def count(piece: str) -> int:
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
        veiled = _veil_comments(text) if separators is MARKDOWN else text
        previous = end = 0
        for piece in cutter.split_text(veiled):
            start = veiled.index(piece, end)
            end = start + len(piece)
            for begin, stop in _fitting(text, start, end, count, size):
                yield self._reach_back(text, previous, begin, stop, count), stop
                previous = begin

    def _reach_back(self, text: str, previous: int, start: int, end: int, count: Callable[[str], int]) -> int:
        """Where the passage begins if it shares up to `overlap_tokens` whole words with the one before."""
        best = start
        for word in reversed(list(re.finditer(r"\S+", text[previous:start]))) if self.overlap_tokens else ():
            begin = previous + word.start()
            if count(text[begin:start]) > self.overlap_tokens or count(text[begin:end]) > self.tokens:
                break
            best = begin
        return best


def _fitting(text: str, start: int, end: int, count: Callable[[str], int], tokens: int) -> Iterator[tuple[int, int]]:
    """The span, or its halves: joined pieces may count a little more than their sum."""
    if end - start <= 1 or count(text[start:end]) <= tokens:
        if text[start:end].strip():
            yield start, end
        return
    middle = (start + end) // 2
    space = max(text.rfind(" ", start + 1, middle + 1), text.rfind("\n", start + 1, middle + 1))
    cut = space if space > start else middle
    yield from _fitting(text, start, cut, count, tokens)
    right = cut
    while right < end - 1 and text[right].isspace():
        right += 1
    yield from _fitting(text, right, end, count, tokens)


def _is_markdown(document: Document) -> bool:
    kind = document.metadata.get("format")
    return kind == "markdown" if kind else PurePath(document.source).suffix.lower() in (".md", ".markdown")


def _lines(text: str) -> Iterator[tuple[int, str, bool]]:
    """Each line: its offset, itself, and whether it is fenced code."""
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
    """Each ATX heading: its offset, level and title."""
    for offset, line, code in _lines(text):
        if not code and (heading := re.match(r"(#{1,6}) +(.+?)(?: +#+)? *$", line)):
            yield offset, len(heading.group(1)), heading.group(2)


def _veil_comments(text: str) -> str:
    """The text, of equal length, in which no line of code looks like a heading."""
    return "\n".join("%" + line[1:] if code and line.startswith("#") else line for _, line, code in _lines(text))


def _place(document: Document, headings: list[tuple[int, int, str]], start: int) -> dict[str, Any]:
    """Where in the document a passage lies, for citations: its page (from 1), its section ("Guide > Install")."""
    place: dict[str, Any] = {}
    if document.page_starts:
        place["page"] = bisect.bisect_right(document.page_starts, start)
    path: list[tuple[int, str]] = []
    for offset, level, title in headings:
        if offset > start:
            break
        path = [(above, name) for above, name in path if above < level] + [(level, title)]
    if path:
        place["section"] = " > ".join(name for _, name in path)
    return place
