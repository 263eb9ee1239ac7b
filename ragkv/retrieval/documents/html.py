"""HTML to plain text with the standard library: drops scripts and styles, turns block boundaries into blank lines.

The standard parser is enough because only the text and its block boundaries are needed, never the tree. It accepts
broken markup, and a base installation needs no other dependency.
"""

import re
from collections import Counter
from html.parser import HTMLParser

from .limits import UNLIMITED, ParseLimits

SKIPPED = frozenset({"script", "style", "template", "noscript", "svg", "math", "iframe", "select"})
_BLOCK_NAMES = """address article aside blockquote body dd details dialog div dl dt fieldset figcaption figure footer
    form h1 h2 h3 h4 h5 h6 header hr html main nav ol p pre section summary table tbody tfoot thead title ul"""
BLOCKS = frozenset(_BLOCK_NAMES.split())
LINES = frozenset({"br", "li", "tr", "option"})
CELLS = frozenset({"td", "th"})


class _TextReader(HTMLParser):
    def __init__(self, limits: ParseLimits) -> None:
        super().__init__(convert_charrefs=True)
        self._limits = limits
        self.parts: list[str] = []
        self.title: list[str] = []
        self._skipped: list[str] = []  # open elements whose text is dropped
        self._open = Counter[str]()  # the same, counted: a page may hold very many
        self._verbatim = 0  # depth of <pre>
        self._in_title = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in SKIPPED:
            self._skipped.append(tag)
            self._open[tag] += 1
            self._limits.check("nesting", len(self._skipped), f"The nesting of <{tag}>")
        elif tag == "title":
            self._in_title = True
        elif tag == "pre":
            self._verbatim += 1
        self._boundary(tag)

    def handle_endtag(self, tag: str) -> None:
        if self._open[tag]:
            closed = ""
            while closed != tag:
                closed = self._skipped.pop()
                self._open[closed] -= 1
        elif tag == "title":
            self._in_title = False
        elif tag == "pre":
            self._verbatim = max(0, self._verbatim - 1)
        if tag in BLOCKS:
            self._boundary(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._boundary(tag)

    def handle_data(self, data: str) -> None:
        if self._in_title and not self._skipped:
            self.title.append(data)
        elif not self._skipped and self._verbatim:
            self.parts.append(data)
        elif not self._skipped:
            text = re.sub(r"\s+", " ", data)
            self.parts.append(text.lstrip() if self._after_space() else text)

    def _after_space(self) -> bool:
        return not self.parts or not self.parts[-1] or self.parts[-1][-1].isspace()

    def _boundary(self, tag: str) -> None:
        if self._skipped:
            return
        if tag in BLOCKS:
            self.parts.append("\n\n")
        elif tag in LINES:
            self.parts.append("\n")
        elif tag in CELLS and not self._after_space():
            self.parts.append("\t")


def text_of(html: str, limits: ParseLimits = UNLIMITED) -> tuple[str, str]:
    """The text of an HTML page and its title ("" if it has none)."""
    reader = _TextReader(limits)
    reader.feed(html)
    reader.close()
    text = re.sub(r"[ \t]+\n", "\n", "".join(reader.parts).replace("\u00a0", " "))
    return re.sub(r"\n{3,}", "\n\n", text).strip(), " ".join("".join(reader.title).split())


def declared_encoding(data: bytes) -> str | None:
    """The encoding that a page declares in its first kilobyte, or `None`."""
    found = re.search(rb"""<meta[^>]+charset\s*=\s*["']?\s*([\w.:-]+)""", data[:1024], re.IGNORECASE)
    return found.group(1).decode("ascii", "replace") if found else None
