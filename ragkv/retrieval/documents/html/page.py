"""HTML to text: headings, lists, tables and code as in Markdown; scripts, styles and the targets of
links are left out.

lxml's parser calls `_Page` for each tag and text, and no tree is built. The parser repairs broken
markup, so every start has its end. The time for a tag grows with its depth. So a page that is
nested deeper than any real one loses its form, but never its text.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from lxml import etree

from ragkv.runtime import counted

from ..formulas import Formula
from ..html_tables import MAX_SPAN, Cell, TableCells, is_layout
from ..marks import Place, note_mark, struck
from .buffers import Buffer
from .lists import OpenList, list_of
from .looks import Sheets, look_of

_SKIPPED_NAMES = (
    """audio canvas datalist iframe noscript rp script select style svg template video"""
)
SKIPPED = frozenset(_SKIPPED_NAMES.split())
# KaTeX writes each formula twice: as MathML, and as spans of this class.
SKIPPED_CLASS = "katex-html"
_BLOCK_NAMES = """address article aside blockquote body caption dd details dialog div dl dt fieldset figcaption figure
    footer form h1 h2 h3 h4 h5 h6 header hr html main nav ol p pre section summary table tbody template tfoot thead
    title ul"""
BLOCKS = frozenset(_BLOCK_NAMES.split())
HEADINGS = {f"h{level}": level for level in range(1, 7)}
CELLS = ("td", "th")
STRUCK = frozenset({"del", "s", "strike"})
# Elements within a line whose text is taken as a whole at their end, but in code. A link has one if
# it leads to a place in the page.
WITHIN_A_LINE = frozenset({"sub", "sup", "ruby", "rt", *STRUCK})
OWN_BUFFER = frozenset({"pre", *CELLS, "title", *HEADINGS}) | WITHIN_A_LINE
# Elements that may be raised or lowered by their style; of others a style moves the whole.
NO_SCRIPTS = BLOCKS | {*CELLS, "tr", "img", "li", "br", "input", "sub", "sup", "body", "html"}
SCRIPTS = {Place.RAISED: "sup", Place.LOWERED: "sub"}
# Elements that stand apart from the text beside them.
APART = frozenset({"button", "textarea", "legend", "summary"})
NAME_CHARS = 200  # of an element's names are looked at
# `MAX_DEPTH` elements may be open at once.
MAX_DEPTH = 2000
# `MAX_INDENT` levels of a list are shown.
MAX_INDENT = 8
# An error of `_Page` ends the parser after at most `FEED_BYTES`.
FEED_BYTES = 16 * 1024
# What marks a note, where it is raised and links.
_NOTE = re.compile(r"[\[(]?[\w*\u2020\u2021\u00a7]{1,4}[\])]?")
# A link to a note that is not raised: behind a word or a number, or named so.
_BEFORE_NOTE = re.compile(r"(?:\w|\d[.,;:]|[\])\u201d\u00bb])\Z")
_NAMED_NOTE = re.compile(r"(?:foot|end|doc-)note|note-?ref|\bfn", re.IGNORECASE)
# Links from a note back to the text have such a text alone.
BACK = frozenset("\u2191\u21a9\u23ce\u2934^\ufe0e\ufe0f")


class _TooDeepError(Exception):
    """More than `MAX_DEPTH` elements are open."""


class _Page:
    """A target of lxml's parser (its names are lxml's)."""

    def __init__(self, sheets: Sheets, shows_all: bool) -> None:
        self._shows_all = shows_all
        self.title = ""
        self.hidden = 0  # texts that are not shown
        self._sheets = sheets
        self._left_out: list[str] = []  # the text within an element that is skipped
        self._skipped_as = ""  # "hidden", or the name of the element
        self._hides_text = False  # some of it is not blank
        self._roles: list[str] = []  # what open elements are treated as
        self._readings: list[list[str]] = []  # beside the text of open rubies
        self._buffers = [Buffer("")]
        self._spans: list[tuple[int, int]] = []  # columns and rows of each open cell
        self._tables: list[TableCells] = []  # that are open
        self._heads = 0  # open heads of tables
        self._lists: list[OpenList] = []  # that are open
        self._skipped = 0  # open elements within one that is skipped
        self._depth = 0  # open elements
        self._formula: Formula | None = None
        self._formula_depth = 0  # open elements within the formula, and itself
        self._links: list[str] = []  # where open links lead
        self._is_note = False  # a raised text that is open leads to a note
        self._target = ""  # where the last link leads within the page
        self._is_new_link = False  # nothing stands in the innermost link yet
        self._is_named_note = False  # the last link is named as one to a note
        self._notes: dict[str, str] = {}  # the id of a note -> its mark

    def start(self, tag: str, attributes: Mapping[str, str]) -> None:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise _TooDeepError
        if self._formula is not None:
            self._formula_depth += 1
            self._formula.start(_local(tag), attributes)
            return
        if _local(tag) == "math" and self._stands_for_a_picture():
            self._start_formula(tag)
            return
        look = look_of(attributes)
        is_hidden = look.is_hidden and not self._shows_all and tag not in ("html", "body")
        if self._skipped or is_hidden or _is_skipped(tag, attributes):
            if not self._skipped:
                self._skipped_as = "hidden" if is_hidden else tag
            self._skipped += 1
            return
        buffer = self._buffers[-1]
        role = tag
        if tag not in NO_SCRIPTS:
            place = look.place or self._sheets.place(tag, attributes)
            role = SCRIPTS.get(place, tag) if place is not None else tag
        self._roles.append(role)
        if tag in BLOCKS:
            buffer.separate("\n\n" if not self._lists or tag not in ("ol", "ul") else "\n")
        elif tag in ("br", "tr", "option"):
            buffer.separate("\n")
        elif tag in APART or (tag == "ins" and buffer.last.endswith("~~")):
            buffer.separate(" ")
        match _local(tag):
            case "table":
                self._tables.append(TableCells())
            case "thead":
                self._heads += 1
            case "ol" | "ul":
                self._lists.append(list_of(tag, attributes))
            case "li":
                indent = "  " * min(len(self._lists) - 1, MAX_INDENT)
                mark = self._lists[-1].mark(attributes) if self._lists else "- "
                buffer.item(f"{indent}{mark}")
            case "td" | "th":
                columns = _span(attributes.get("colspan"))
                self._spans.append((columns, _span(attributes.get("rowspan"))))
            case "a":
                self._start_link(attributes)
            case "ruby":
                self._readings.append([])
            case "q":
                buffer.write('"')
        if (note := self._notes.get(attributes.get("id", ""))) and (tag in BLOCKS or tag == "li"):
            buffer.mark = f"{note}: "
        if role in OWN_BUFFER and not (role in STRUCK and buffer.tag == "pre"):
            self._buffers.append(Buffer(role))

    def end(self, tag: str) -> None:
        self._depth -= 1
        if self._formula is not None:
            self._end_in_formula(self._formula)
            return
        if self._skipped:
            self._skipped -= 1
            if not self._skipped:
                self._end_skipped()
            return
        role = self._roles.pop()
        if role in OWN_BUFFER and self._buffers[-1].tag == role:
            self._end_buffer(self._buffers.pop())
        elif tag == "tr" and self._tables:
            self._tables[-1].end_row()
        elif tag == "table" and self._tables:
            self._end_table(self._tables.pop())
        elif tag == "thead":
            self._heads -= 1
        elif tag in ("ol", "ul") and self._lists:
            self._lists.pop()
        elif tag == "q":
            self._buffers[-1].write('"')
        if tag == "a" and self._links:
            self._end_link()
        elif tag in APART:
            self._buffers[-1].separate(" ")
        if tag in BLOCKS:
            self._buffers[-1].separate(
                "\n" if self._lists and tag in ("ol", "ul", "p", "div") else "\n\n"
            )

    def data(self, text: str) -> None:
        if self._formula is not None:
            self._formula.data(text)
            return
        buffer = self._buffers[-1]
        if self._skipped:
            self._left_out.append(text)
            self._hides_text = self._hides_text or bool(text.strip())
            return
        if not text:
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

    def _stands_for_a_picture(self) -> bool:
        """Whether a formula is shown, or hidden alone: Wikipedia shows a picture of it."""
        is_alone = self._skipped_as == "hidden" and not self._hides_text
        return is_alone or not self._skipped

    def _start_formula(self, tag: str) -> None:
        self._roles.append(tag)
        self._formula = Formula()
        self._formula_depth = 1

    def _start_link(self, attributes: Mapping[str, str]) -> None:
        place, _, target = attributes.get("href", "").partition("#")
        self._target = "" if "://" in place else target  # a note stands in the same work
        self._links.append(self._target)
        self._is_new_link = True
        names = (attributes.get(name, "") for name in ("role", "epub:type", "class", "id"))
        self._is_named_note = bool(_NAMED_NOTE.search(" ".join(names)[:NAME_CHARS]))
        if self._buffers[-1].tag == "sup":
            self._is_note = bool(self._target)
        elif self._buffers[-1].tag != "pre":
            self._buffers.append(Buffer("a"))

    def _end_link(self) -> None:
        self._links.pop()
        if self._buffers[-1].tag != "a":
            return
        buffer = self._buffers.pop()
        outer = self._buffers[-1]
        text = buffer.take()
        outer.separate(buffer.lead)
        is_behind = self._is_named_note or bool(_BEFORE_NOTE.search(outer.last[-2:]))
        if self._target and is_behind and _NOTE.fullmatch(text):
            self._write_note(text, outer)
        elif text:
            outer.write(text)
        outer.separate(buffer.gap)

    def _end_skipped(self) -> None:
        if self._skipped_as == "style":
            self._sheets.add("".join(self._left_out))
        elif self._skipped_as == "hidden":
            self.hidden += self._hides_text
        self._left_out = []
        self._hides_text = False

    def _end_in_formula(self, formula: Formula) -> None:
        self._formula_depth -= 1
        if self._formula_depth:
            formula.end()
        else:
            self._formula = None
            self._roles.pop()
            if formula.text:
                self._buffers[-1].write(formula.text)

    def _end_buffer(self, buffer: Buffer) -> None:
        tag = buffer.tag
        text = buffer.take()
        outer = self._buffers[-1]
        if tag == "title":
            self.title = self.title or text
        elif tag in WITHIN_A_LINE:
            outer.separate(buffer.lead)
            self._end_within(tag, text, outer)
            outer.separate(buffer.gap)
        elif tag in CELLS:
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

    def _end_within(self, tag: str, text: str, outer: Buffer) -> None:
        if tag in ("sub", "sup"):
            self._end_script(tag, text.strip(), outer)
        elif tag == "ruby":
            reading = "".join(self._readings.pop())
            outer.write(f"{text}({reading})" if reading and text else text or reading)
        elif tag == "rt" and self._readings:
            self._readings[-1].append(text)
        elif text.strip():
            outer.write(struck(text) if tag in STRUCK else text)

    def _end_script(self, tag: str, text: str, outer: Buffer) -> None:
        """A raised or lowered text; one that is alone in a link within the page marks a note."""
        is_note = tag == "sup" and bool(_NOTE.fullmatch(text))
        if is_note and (self._is_note or (self._is_new_link and any(self._links[-1:]))):
            self._write_note(text, outer)
        elif text:
            outer.write(text, Place.LOWERED if tag == "sub" else Place.RAISED)
        self._is_note = False

    def _write_note(self, text: str, outer: Buffer) -> None:
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


@dataclass(frozen=True, slots=True)
class PageText:
    """What is read of a page."""

    text: str
    title: str  # "" if it has none
    hidden: int  # texts that are not shown, which are left out

    @property
    def lost(self) -> list[str]:
        """What was left out, in words."""
        return [counted(self.hidden, "hidden text")] if self.hidden else []


def text_of(html: str, sheets: Sheets | None = None) -> PageText:
    """The text of an HTML page. `sheets` are style sheets that stand beside it.

    A page that hides all of its text shows it by a script, so it is read.
    """
    page = _text_of(html, sheets, shows_all=False)
    return page if page.text or not page.hidden else _text_of(html, sheets, shows_all=True)


def _text_of(html: str, sheets: Sheets | None, shows_all: bool) -> PageText:
    page = _Page(Sheets(sheets), shows_all)
    parser = etree.HTMLParser(target=page, encoding="utf-8", huge_tree=True)
    try:
        data = html.encode("utf-8", "replace")
        for start in range(0, len(data), FEED_BYTES):
            parser.feed(data[start : start + FEED_BYTES])
        text = parser.close() if html else ""
    except _TooDeepError:
        text = " ".join(re.sub(r"<[^<>]*>", " ", html).split())
    return PageText(text, page.title, page.hidden)


def _is_skipped(tag: str, attributes: Mapping[str, str]) -> bool:
    """Whether an element is never shown, or repeats another. A shadow root is shown."""
    if tag == "template" and attributes.keys() & {"shadowrootmode", "shadowroot"}:
        return False
    if tag == "dialog" and "open" not in attributes:
        return True
    return tag in SKIPPED or SKIPPED_CLASS in attributes.get("class", "").split()


def _local(tag: str) -> str:
    """The name of an element without its prefix, as in "m:math"."""
    return tag.rpartition(":")[2]


def _span(value: str | None) -> int:
    return min(MAX_SPAN, max(1, int(value[:9]))) if value and value.isdecimal() else 1
