"""Splits documents into passages of a counted number of tokens. It counts by a callable and knows
no tokenizer.

langchain-text-splitters chooses where to cut. The spans are computed here, because the library's
own start index mixes tokens and characters when lengths are counted in tokens. Invariant:
`document.text[start:end] == passage.text`, always.
"""

import bisect
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import PurePath

from ragkv.config import CHUNK_TOKENS
from ragkv.errors import ConfigError
from ragkv.runtime import Check, no_check

from .documents.files import MARKDOWN as MARKDOWN_FILES
from .ingested import Document, digest
from .passages import Passage, with_place

# `PLAIN` and `MARKDOWN` say where to cut, best first: by regexes whose match begins the next
# passage (white space is then stripped from it).
PLAIN = (r"\n\s*\n", r"\n", r"(?<=[.!?])\s+", r"(?<=[。！？；])", r"\s+", "")
MARKDOWN = (r"\n(?=# )", r"\n(?=## )", r"\n(?=#{3,6} )", r"\n(?=(?:```|~~~))", *PLAIN)
# A text of more characters a token than this is not counted as a whole.
MOST_CHARS_A_TOKEN = 32
# Of a heading `TITLE_CHARS` are kept, and of all headings above a passage together `SECTION_CHARS`.
TITLE_CHARS = 200
SECTION_CHARS = 250
# A line that opens or closes code, also in a quotation, or has nothing at all.
_FENCE = re.compile(r"[> \t]*(`{3,}[^`]*|~{3,}.*)?")


@dataclass(frozen=True, slots=True)
class Splitter:
    """Cuts documents into passages of at most `tokens` tokens, at headings, paragraphs, lines,
    sentences or words.

    A document that fits stays whole. Headings are looked for in Markdown only: by the source's
    suffix, or by `metadata["format"] == "markdown"`.
    """

    # tokens of a text, without special tokens
    count_tokens: Callable[[str], int] = field(repr=False)
    tokens: int = CHUNK_TOKENS  # most tokens of a passage
    tokenizer_id: str = ""  # names the tokenizer: documents are split again when it changes

    def __post_init__(self) -> None:
        if self.tokens < 1:
            raise ConfigError(f"tokens is {self.tokens}; a passage needs at least 1.")

    @property
    def fingerprint(self) -> str:
        """Changes when the same document would be split differently."""
        return f"recursive-5:{self.tokens}:{self.tokenizer_id}"

    def split(self, document: Document, check: Check = no_check) -> list[Passage]:
        """The passages of `document`, in order; none if it is blank. What `check` raises ends the
        splitting.
        """
        markdown = _is_markdown(document)
        headings, sections = _sections(document.text) if markdown else ([], [])
        occurrences: Counter[str] = Counter()
        passages = []
        for start, end in self._spans(document.text, markdown, check):
            text = document.text[start:end]
            passage_id = digest(document.id, text, str(occurrences[text]))
            occurrences[text] += 1
            page = bisect.bisect_right(document.page_starts, start) or None
            above = bisect.bisect_right(headings, start)
            section = _section(sections[above - 1]) if above else None
            metadata = with_place(document.metadata, page, section)
            place = ((start, end), document.source, metadata, page, section)
            passages.append(Passage(passage_id, document.id, text, *place))
        return passages

    def _spans(self, text: str, markdown: bool, check: Check) -> Iterator[tuple[int, int]]:
        """Where passages are. A line that only opens or closes code is none: it stays with the one
        before, or goes.
        """

        @lru_cache(maxsize=1 << 16)  # the library counts the same words over and over
        def count(piece: str) -> int:
            check()
            return self.count_tokens(piece) if piece else 0

        def fits(piece: str) -> bool:
            return len(piece) <= MOST_CHARS_A_TOKEN * self.tokens and count(piece) <= self.tokens

        words = text.strip()
        if fits(words) and not _only_fences(words):
            yield (len(text) - len(text.lstrip()), len(text.rstrip()))
            return
        waiting: tuple[int, int] | None = None
        for start, end in self._pieces(text, markdown, count):
            for span in _halve_until_it_fits(text, start, end, count, self.tokens):
                is_code_mark = _only_fences(text[slice(*span)])
                if is_code_mark and waiting is not None and fits(text[waiting[0] : span[1]]):
                    waiting = (waiting[0], span[1])
                    continue
                if waiting is not None:
                    yield waiting
                # what does not fit to the passage before is not tried again with the next mark
                waiting = None if is_code_mark else span
        if waiting is not None:
            yield waiting

    def _pieces(
        self, text: str, markdown: bool, count: Callable[[str], int]
    ) -> list[tuple[int, int]]:
        """The spans that the library chooses. A piece counts for at least one token: the library
        takes time with the square of the pieces of a passage.
        """
        from langchain_text_splitters import RecursiveCharacterTextSplitter  # takes half a second

        cutter = RecursiveCharacterTextSplitter(
            separators=list(MARKDOWN if markdown else PLAIN),
            is_separator_regex=True,
            keep_separator="start",
            chunk_size=self.tokens,
            chunk_overlap=0,
            length_function=lambda piece: max(count(piece), bool(piece)),
        )
        masked = _mask_code_comments(text) if markdown else text
        spans: list[tuple[int, int]] = []
        end = 0
        for piece in cutter.split_text(masked):
            start = masked.index(piece, end)
            end = start + len(piece)
            while spans and start == spans[-1][1] and start < end and _is_inside(text, start):
                start += 1
                spans[-1] = (spans[-1][0], start)
            spans.append((start, end))
        return spans


def _only_fences(text: str) -> bool:
    return all(map(_FENCE.fullmatch, text.split("\n")))


def _is_inside(text: str, at: int) -> bool:
    """Whether `at` is inside of what a reader sees as one character: a letter with its marks, a
    joined emoji.
    """
    here = text[at]
    return (
        unicodedata.category(here)[0] == "M"
        or "\u200d" in (here, text[at - 1])
        or "\U0001f3fb" <= here <= "\U0001f3ff"  # colours of a skin
        or "\U000e0020" <= here <= "\U000e007f"  # letters of a flag
    )


def _halve_until_it_fits(
    text: str, start: int, end: int, count: Callable[[str], int], tokens: int
) -> Iterator[tuple[int, int]]:
    """The span, halved if needed: joined pieces may have a few more tokens than the sum of their
    counts.
    """
    if end - start <= 1 or count(text[start:end]) <= tokens:
        if text[start:end].strip():
            yield start, end
        return
    middle = (start + end) // 2
    space = max(text.rfind(" ", start + 1, middle + 1), text.rfind("\n", start + 1, middle + 1))
    whole = next((at for at in range(middle, start, -1) if not _is_inside(text, at)), middle)
    cut = space if space > start else whole
    yield from _halve_until_it_fits(text, start, cut, count, tokens)
    right = cut
    while right < end - 1 and text[right].isspace():
        right += 1
    yield from _halve_until_it_fits(text, right, end, count, tokens)


def _is_markdown(document: Document) -> bool:
    declared = document.metadata.get("format")
    return (
        declared == "markdown"
        if declared
        else PurePath(document.source).suffix.lower() in MARKDOWN_FILES
    )


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


def _sections(text: str) -> tuple[list[int], list[tuple[str, ...]]]:
    """Where each heading stands, and the titles from the top down to it."""
    places = list[int]()
    sections = list[tuple[str, ...]]()
    path = list[tuple[int, str]]()
    for place, level, title in _headings(text):
        path = [(above, name) for above, name in path if above < level] + [(level, title)]
        places.append(place)
        sections.append(tuple(name for _, name in path))
    return places, sections


def _section(titles: Sequence[str]) -> str:
    """The section of a citation, as in "Guide > Install". Each passage has one, so of a long one
    the end is kept.
    """
    joined = " > ".join(titles)
    return joined if len(joined) <= SECTION_CHARS else f"...{joined[-SECTION_CHARS:]}"


def _headings(text: str) -> Iterator[tuple[int, int, str]]:
    """The offset, level and title of each ATX heading. A very long title is cut: every passage
    below repeats it.
    """
    for offset, line, code in _lines(text):
        if not code and (heading := re.match(r"(#{1,6})[ \t]+(?=\S)", line)):
            title = line[heading.end() :].rstrip()
            closed = title.rstrip("#")
            title = closed.rstrip() if closed.endswith((" ", "\t")) else title
            yield (
                offset,
                len(heading[1]),
                title if len(title) <= TITLE_CHARS else f"{title[:TITLE_CHARS]}...",
            )


def _mask_code_comments(text: str) -> str:
    """A text of equal length in which no line of code looks like a heading."""
    return "\n".join(
        "%" + line[1:] if code and line.startswith("#") else line for _, line, code in _lines(text)
    )
