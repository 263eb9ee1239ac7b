"""HTML to text: headings, lists, tables and code as in Markdown; scripts, styles and the targets of
links are left out.

lxml's parser calls `_Page` for each tag and text, and no tree is built. It repairs broken markup,
so every start has its end. What it does about tags takes time by their depth: a page of deeper
nesting than any real one loses its form, never its text.
"""

import re
from dataclasses import dataclass, field
from enum import Enum, auto

from lxml import etree

from .formulas import Formula
from .html_tables import MAX_SPAN, Cell, TableCells, is_layout
from .marks import Kind, lowered, note_mark, number_text, raised
from .reading import FileContent, Loaded

SKIPPED = frozenset({"script", "style", "template", "noscript", "svg", "iframe", "select"})
# KaTeX writes each formula twice: as MathML, and as spans of this class.
SKIPPED_CLASS = "katex-html"
_BLOCK_NAMES = """address article aside blockquote body caption dd details dialog div dl dt fieldset figcaption figure
    footer form h1 h2 h3 h4 h5 h6 header hr html main nav ol p pre section summary table tbody template tfoot thead
    title ul"""
BLOCKS = frozenset(_BLOCK_NAMES.split())
HEADINGS = {f"h{level}": level for level in range(1, 7)}
# The text of elements in `OWN_BUFFER` is taken as a whole at their end.
OWN_BUFFER = frozenset({"pre", "td", "th", "title", "sub", "sup", *HEADINGS})
# What stands between two texts, from the weakest to the strongest.
GAPS = ("", " ", "\n", "\n\n")
# `MAX_DEPTH` elements may be open at once.
MAX_DEPTH = 2000
# `MAX_INDENT` levels of a list are shown.
MAX_INDENT = 8
# An error of `_Page` ends the parser after at most `FEED_BYTES`.
FEED_BYTES = 16 * 1024
# A page declares its encoding within `DECLARED_BYTES`.
DECLARED_BYTES = 4096
# Kinds of numbers, by the attribute `type` and by the style `list-style-type`.
NUMBERS: dict[str, Kind] = {
    "1": "decimal",
    "a": "letter",
    "A": "LETTER",
    "i": "roman",
    "I": "ROMAN",
    "decimal-leading-zero": "padded",
    "lower-alpha": "letter",
    "lower-latin": "letter",
    "lower-roman": "roman",
    "upper-alpha": "LETTER",
    "upper-latin": "LETTER",
    "upper-roman": "ROMAN",
}
# Items of a list of this class have their numbers in their text: `ragkv.retrieval.documents.office.word`.
WRITTEN = "written"
# What marks a note, where it is raised and links.
_NOTE = re.compile(r"[\[(]?[\w*\u2020\u2021\u00a7]{1,4}[\])]?")
# Links from a note back to the text have such a text alone.
BACK = frozenset("\u2191\u21a9\u23ce\u2934^\ufe0e\ufe0f")


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

    @property
    def last(self) -> str:
        """What the next text is written behind; "" if there will be a gap."""
        return self.parts[-1] if self.parts and not self.gap else ""

    def take(self) -> str:
        return "".join(self.parts)


class _Marks(Enum):
    """How a list marks its items."""

    NUMBERS = auto()
    BULLETS = auto()
    NOTHING = auto()  # the texts have them


@dataclass(slots=True)
class _OpenList:
    marks: _Marks
    kind: Kind = "decimal"
    number: int = 1  # of the next item
    step: int = 1

    def mark(self, attributes: dict[str, str]) -> str:
        """The mark of the next item, with a space."""
        if self.marks is not _Marks.NUMBERS:
            return "- " if self.marks is _Marks.BULLETS else ""
        self.number = _whole(attributes.get("value"), self.number)
        number = self.number
        self.number += self.step
        return f"{number_text(number, NUMBERS.get(attributes.get('type', ''), self.kind))}. "


class _Page:
    """A target of lxml's parser (its names are lxml's)."""

    def __init__(self) -> None:
        self.title = ""
        self._buffers = [_Buffer("")]
        self._spans: list[tuple[int, int]] = []  # columns and rows of each open cell
        self._tables: list[TableCells] = []  # that are open
        self._heads = 0  # open heads of tables
        self._lists: list[_OpenList] = []  # that are open
        self._skipped = 0  # open elements within one that is skipped
        self._depth = 0  # open elements
        self._formula: Formula | None = None
        self._formula_depth = 0  # open elements within the formula, and itself
        self._links: list[str] = []  # where open links lead
        self._is_note = False  # a raised text that is open leads to a note
        self._target = ""  # where the last link leads within the page
        self._is_new_link = False  # nothing stands in the innermost link yet
        self._notes: dict[str, str] = {}  # the id of a note -> its mark

    def start(self, tag: str, attributes: dict[str, str]) -> None:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise _TooDeepError
        if self._formula is not None:
            self._formula_depth += 1
            self._formula.start(_local(tag))
            return
        if self._skipped or _is_skipped(tag, attributes):
            self._skipped += 1
            return
        buffer = self._buffers[-1]
        if tag in BLOCKS:
            buffer.separate("\n\n" if not self._lists or tag not in ("ol", "ul") else "\n")
        elif tag in ("br", "tr", "option"):
            buffer.separate("\n")
        match _local(tag):
            case "table":
                self._tables.append(TableCells())
            case "thead":
                self._heads += 1
            case "ol" | "ul":
                self._lists.append(_list_of(tag, attributes))
            case "li":
                indent = "  " * min(len(self._lists) - 1, MAX_INDENT)
                mark = self._lists[-1].mark(attributes) if self._lists else "- "
                buffer.item(f"{indent}{mark}")
            case "td" | "th":
                columns = _span(attributes.get("colspan"))
                self._spans.append((columns, _span(attributes.get("rowspan"))))
            case "a":
                self._start_link(attributes)
            case "math":
                self._formula = Formula()
                self._formula_depth = 1
        if (note := self._notes.get(attributes.get("id", ""))) and (tag in BLOCKS or tag == "li"):
            buffer.mark = f"{note}: "
        if tag in OWN_BUFFER:
            self._buffers.append(_Buffer(tag))

    def end(self, tag: str) -> None:
        self._depth -= 1
        if self._formula is not None:
            self._end_in_formula(self._formula)
            return
        if self._skipped:
            self._skipped -= 1
            return
        if tag in OWN_BUFFER and self._buffers[-1].tag == tag:
            self._end_buffer(self._buffers.pop())
        elif tag == "tr" and self._tables:
            self._tables[-1].end_row()
        elif tag == "table" and self._tables:
            self._end_table(self._tables.pop())
        elif tag == "thead":
            self._heads -= 1
        elif tag in ("ol", "ul") and self._lists:
            self._lists.pop()
        elif tag == "a" and self._links:
            self._end_link()
        if tag in BLOCKS:
            self._buffers[-1].separate(
                "\n" if self._lists and tag in ("ol", "ul", "p", "div") else "\n\n"
            )

    def data(self, text: str) -> None:
        if self._formula is not None:
            self._formula.data(text)
            return
        buffer = self._buffers[-1]
        if self._skipped or not text:
            return
        if buffer.tag == "pre":
            buffer.write(text)
            return
        words = " ".join(text.split())
        if words and any(self._links[-1:]) and BACK.issuperset(words):
            return
        if words and buffer.tag != "sup":
            self._is_new_link = False
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
            self._end_buffer(self._buffers.pop())
        while self._tables:
            self._end_table(self._tables.pop())
        return self._buffers[0].take().strip()

    def _start_link(self, attributes: dict[str, str]) -> None:
        self._target = attributes.get("href", "").partition("#")[2]
        self._links.append(self._target)
        self._is_new_link = True
        if "noteref" in attributes.get("role", "") + attributes.get("epub:type", ""):
            self._buffers.append(_Buffer("a"))
        elif self._buffers[-1].tag == "sup":
            self._is_note = bool(self._target)

    def _end_link(self) -> None:
        if self._buffers[-1].tag == "a":
            buffer = self._buffers.pop()
            self._write_note(buffer.take(), self._buffers[-1])
        self._links.pop()

    def _end_in_formula(self, formula: Formula) -> None:
        self._formula_depth -= 1
        if self._formula_depth:
            formula.end()
        else:
            self._formula = None
            if formula.text:
                self._buffers[-1].write(formula.text)

    def _end_buffer(self, buffer: _Buffer) -> None:
        tag = buffer.tag
        text = buffer.take()
        outer = self._buffers[-1]
        if tag == "title":
            self.title = self.title or text
        elif tag in ("sub", "sup"):
            self._end_script(tag, text.strip(), outer)
            if buffer.gap:
                outer.separate(" ")
        elif tag in ("td", "th"):
            columns, rows = self._spans.pop()
            if self._tables:
                is_name = tag == "th" or self._heads > 0
                self._tables[-1].add(Cell(text, columns, rows, is_name))
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

    def _end_script(self, tag: str, text: str, outer: _Buffer) -> None:
        """A raised or lowered text; one that is alone in a link within the page marks a note."""
        is_note = tag == "sup" and bool(_NOTE.fullmatch(text))
        if is_note and (self._is_note or (self._is_new_link and any(self._links[-1:]))):
            self._write_note(text, outer)
        elif text:
            outer.write(lowered(text, outer.last) if tag == "sub" else raised(text))
        self._is_note = False

    def _write_note(self, text: str, outer: _Buffer) -> None:
        mark = note_mark(text)
        if self._target:
            self._notes.setdefault(self._target, mark)
        outer.write(mark)

    def _end_table(self, table: TableCells) -> None:
        table.end_row()
        buffer = self._buffers[-1]
        if any(is_layout(row.values()) for row in table.rows):
            for row in table.rows:
                buffer.separate("\n\n")
                buffer.write("\n\n".join(cell.text for cell in row.values() if cell.text))
        elif table.rows:
            buffer.separate("\n")
            buffer.write("\n".join(table.lines()))
        buffer.separate("\n\n")


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


def _is_skipped(tag: str, attributes: dict[str, str]) -> bool:
    """Whether an element is never shown, or repeats another. A shadow root is shown."""
    if tag == "template" and attributes.keys() & {"shadowrootmode", "shadowroot"}:
        return False
    return tag in SKIPPED or SKIPPED_CLASS in attributes.get("class", "").split()


def _list_of(tag: str, attributes: dict[str, str]) -> _OpenList:
    style = re.search(r"list-style(?:-type)?\s*:\s*([\w-]+)", attributes.get("style", "")[:1000])
    look = style.group(1).lower() if style else attributes.get("type", "1")
    if WRITTEN in attributes.get("class", "").split() or look == "none":
        return _OpenList(_Marks.NOTHING)
    is_unknown = "reversed" in attributes and "start" not in attributes  # where it begins
    if tag == "ul" or is_unknown:
        return _OpenList(_Marks.BULLETS)
    step = -1 if "reversed" in attributes else 1
    kind = NUMBERS.get(look, "decimal")
    return _OpenList(_Marks.NUMBERS, kind, _whole(attributes.get("start"), 1), step)


def _whole(value: str | None, otherwise: int) -> int:
    found = re.match(r"([+-]?[0-9]{1,9})(?![0-9])", (value or "").lstrip())
    return int(found.group(1)) if found else otherwise


def _local(tag: str) -> str:
    """The name of an element without its prefix, as in "m:math"."""
    return tag.rpartition(":")[2]


def _span(value: str | None) -> int:
    return min(MAX_SPAN, max(1, int(value[:9]))) if value and value.isdecimal() else 1
