"""HTML to text: headings, lists, tables and code as in Markdown; scripts, styles and the targets of
links are left out.

lxml's parser calls `_Page` for each tag and text, and no tree is built. It repairs broken markup,
so every start has its end. What it does about tags takes time by their depth: a page of deeper
nesting than any real one loses its form, never its text.
"""

import re
from dataclasses import dataclass, field

from lxml import etree

from .reading import FileContent, Loaded

SKIPPED = frozenset({"script", "style", "template", "noscript", "svg", "math", "iframe", "select"})
_BLOCK_NAMES = """address article aside blockquote body caption dd details dialog div dl dt fieldset figcaption figure
    footer form h1 h2 h3 h4 h5 h6 header hr html main nav ol p pre section summary table tbody tfoot thead title ul"""
BLOCKS = frozenset(_BLOCK_NAMES.split())
HEADINGS = {f"h{level}": level for level in range(1, 7)}
# The text of elements in `OWN_BUFFER` is taken as a whole at their end.
OWN_BUFFER = frozenset({"pre", "td", "th", "title", *HEADINGS})
# `GAPS` are what stands between two texts, from the weakest to the strongest.
GAPS = ("", " ", "\n", "\n\n")
# `MAX_DEPTH` elements may be open at once.
MAX_DEPTH = 2000
# A cell reaches over at most `MAX_SPAN` columns or rows.
MAX_SPAN = 100
# `MAX_INDENT` levels of a list are shown.
MAX_INDENT = 8
# An error of `_Page` ends the parser after at most `FEED_BYTES`.
FEED_BYTES = 16 * 1024
# A page declares its encoding within `DECLARED_BYTES`.
DECLARED_BYTES = 4096


class _TooDeepError(Exception):
    """More than `MAX_DEPTH` elements are open."""


@dataclass(slots=True)
class _Buffer:
    """Text that is being put together. Of the gaps between two texts the strongest counts."""

    tag: str
    parts: list[str] = field(default_factory=list)
    gap: str = ""
    mark: str = ""  # of a list's item, before its first text

    def separate(self, gap: str) -> None:
        if not self.mark and GAPS.index(gap) > GAPS.index(self.gap):
            self.gap = gap

    def item(self, mark: str) -> None:
        self.mark = ""
        self.separate("\n")
        self.mark = mark

    def write(self, text: str) -> None:
        self.parts += (self.gap if self.parts else "", self.mark, text)
        self.gap = self.mark = ""

    def take(self) -> str:
        return "".join(self.parts)


class _Row:
    """The cells of a row, each in its column: cells above that reach into it take columns, too."""

    def __init__(self) -> None:
        self.cells: list[str] = []
        self.reaching: dict[int, int] = {}  # column -> how many further rows a cell reaches into

    def add(self, text: str, columns: int, rows: int) -> None:
        while self.reaching.get(len(self.cells), 0):
            self.reaching[len(self.cells)] -= 1
            self.cells.append("")
        for column in range(len(self.cells), len(self.cells) + columns):
            if rows > 1 and column < MAX_SPAN:
                self.reaching[column] = rows - 1
        self.cells += [text, *[""] * (columns - 1)]

    def take(self) -> list[str]:
        for column in [column for column in self.reaching if column >= len(self.cells)]:
            self.reaching[column] -= 1
        self.reaching = {column: rows for column, rows in self.reaching.items() if rows > 0}
        cells = self.cells
        self.cells = []
        return cells


class _Page:
    """A target of lxml's parser (its names are lxml's)."""

    def __init__(self) -> None:
        self.title = ""
        self._buffers = [_Buffer("")]
        self._spans: list[tuple[int, int]] = []  # columns and rows of each open cell
        self._rows: list[_Row] = []  # of each open table
        # of each open list: the number of its last item, if it has numbers
        self._lists: list[int | None] = []
        self._skipped = self._depth = 0  # open elements within one that is skipped; open elements

    def start(self, tag: str, attributes: dict[str, str]) -> None:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise _TooDeepError
        if self._skipped or tag in SKIPPED:
            self._skipped += 1
            return
        buffer = self._buffers[-1]
        if tag in BLOCKS:
            buffer.separate("\n\n" if not self._lists or tag not in ("ol", "ul") else "\n")
        elif tag in ("br", "tr", "option"):
            buffer.separate("\n")
        if tag == "table":
            self._rows.append(_Row())
        elif tag in ("ol", "ul"):
            self._lists.append(0 if tag == "ol" else None)
        elif tag == "li":
            buffer.item(self._mark())
        elif tag in ("td", "th"):
            self._spans.append((_span(attributes.get("colspan")), _span(attributes.get("rowspan"))))
        if tag in OWN_BUFFER:
            self._buffers.append(_Buffer(tag))

    def end(self, tag: str) -> None:
        self._depth -= 1
        if self._skipped:
            self._skipped -= 1
            return
        if tag in OWN_BUFFER and self._buffers[-1].tag == tag:
            self._end_buffer(tag, self._buffers.pop().take())
        elif tag in ("tr", "table") and self._rows:
            self._end_row(self._rows[-1].take())
            if tag == "table":
                self._rows.pop()
        elif tag in ("ol", "ul") and self._lists:
            self._lists.pop()
        if tag in BLOCKS:
            self._buffers[-1].separate(
                "\n" if self._lists and tag in ("ol", "ul", "p", "div") else "\n\n"
            )

    def data(self, text: str) -> None:
        buffer = self._buffers[-1]
        if self._skipped or not text:
            return
        if buffer.tag == "pre":
            buffer.write(text)
            return
        words = " ".join(text.split())
        if not words or text[0].isspace():
            buffer.separate(" ")
        if words:
            buffer.write(words)
            if text[-1].isspace():
                buffer.separate(" ")

    def comment(self, text: str) -> None:
        """Comments are left out."""

    def close(self) -> str:
        while len(self._buffers) > 1:
            buffer = self._buffers.pop()
            self._end_buffer(buffer.tag, buffer.take())
        for row in self._rows:
            self._end_row(row.take())
        return self._buffers[0].take().strip()

    def _mark(self) -> str:
        indent = "  " * min(len(self._lists) - 1, MAX_INDENT)
        if not self._lists or self._lists[-1] is None:
            return f"{indent}- "
        self._lists[-1] += 1
        return f"{indent}{self._lists[-1]}. "

    def _end_buffer(self, tag: str, text: str) -> None:
        outer = self._buffers[-1]
        if tag == "title":
            self.title = self.title or text
        elif tag in ("td", "th"):
            columns, rows = self._spans.pop()
            if self._rows:
                self._rows[-1].add(text, columns, rows)
            elif text:
                outer.separate(" ")
                outer.write(text)
        elif tag == "pre" and text.strip():
            fence = "~~~~" if "```" in text else "```"
            outer.write(f"{fence}\n" + text.strip("\n") + f"\n{fence}")
        elif text.strip():
            outer.write(
                f"{'#' * HEADINGS[tag]} {' '.join(text.split())}" if tag in HEADINGS else text
            )

    def _end_row(self, cells: list[str]) -> None:
        """A line with a tab between cells; cells of several paragraphs, as tables for layout have,
        one by one.
        """
        if not any(cells):
            return
        is_layout = any("\n\n" in cell or cell.startswith(("#", "```", "~~~")) for cell in cells)
        buffer = self._buffers[-1]
        buffer.separate("\n\n" if is_layout else "\n")
        lines = (
            ("\n\n".join(filter(None, cells)),)
            if is_layout
            else (" ".join(cell.split()) for cell in cells)
        )
        buffer.write("\t".join(lines).rstrip("\t"))
        buffer.separate("\n\n" if is_layout else "\n")


def text_of(html: str) -> tuple[str, str]:
    """The text of an HTML page and its title ("" if it has none)."""
    page = _Page()
    parser = etree.HTMLParser(target=page, encoding="utf-8", huge_tree=True)
    try:
        data = html.encode("utf-8", "replace")
        for start in range(0, len(data), FEED_BYTES):
            parser.feed(data[start : start + FEED_BYTES])
        text = parser.close() if html else ""
    except _TooDeepError:
        text = " ".join(re.sub(r"<[^<>]*>", " ", html).split())
    return text, page.title


def declared_encoding(data: bytes) -> str | None:
    """The encoding that a page declares near its start, or `None`. UTF-16 declared in ASCII is a
    mistake for UTF-8.
    """
    head = re.sub(rb"<!--.*?-->", b"", data[:DECLARED_BYTES], flags=re.DOTALL)
    found = re.search(
        rb"""<\?xml[^>]+encoding\s*=\s*["']([\w.:-]+)""", head, re.IGNORECASE
    ) or re.search(rb"""<meta\b[^>]+charset\s*=\s*["']?\s*([\w.:-]+)""", head, re.IGNORECASE)
    label = found.group(1).decode("ascii", "replace") if found else None
    return "utf-8" if label and label.lower().startswith(("utf-16", "utf16", "unicode")) else label


def load_html(content: FileContent) -> Loaded:
    """One document, read in the encoding that the page declares."""
    text, title = text_of(content.text(declared_encoding(content.data)))
    yield content.document(text, {"format": "markdown", "title": title})


def _span(value: str | None) -> int:
    return min(MAX_SPAN, max(1, int(value[:9]))) if value and value.isdecimal() else 1
