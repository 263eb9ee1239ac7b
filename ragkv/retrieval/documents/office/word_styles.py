"""The styles of Word files: what paragraphs and characters get from them, and from those that they
are based on.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

NS = {"w": "http://schemas.openxmlformats.org/wordprocessingml/2006/main"}
W = f"{{{NS['w']}}}"
# So many styles are looked through for what one of them is based on.
MOST_BASES = 20
# Text is raised or lowered by at least so many half-points; less aligns it.
LEAST_POSITION = 3


@dataclass(frozen=True, slots=True)
class Style:
    """What a paragraph or a character gets from its style alone."""

    name: str = ""
    base: str = ""
    outline: str = ""  # level, from "0"
    list_id: str = ""
    level: str = ""
    hidden: str = ""  # "1" or "0" if the style says so
    align: str = ""  # "superscript", "subscript" or "baseline"
    position: str = ""  # above the line, in half-points


class Styles:
    """The styles of a file, by their ids."""

    def __init__(self, root: Any) -> None:
        self._styles = {
            str(one.get(f"{W}styleId")): _style(one) for one in root.iterfind("w:style", NS)
        }
        default = root.find("w:style[@w:default='1'][@w:type='paragraph']", NS)
        self._default = "" if default is None else str(default.get(f"{W}styleId"))

    def of(self, properties: Any) -> Style:
        """The style of a paragraph with these properties (`None`: none)."""
        return self._styles.get(self.id_of(properties), Style())

    def id_of(self, properties: Any) -> str:
        """The id of the style of a paragraph."""
        return (value_of(properties, "w:pStyle") if properties is not None else "") or self._default

    def chain(self, style_id: str) -> Iterator[tuple[str, Style]]:
        """A style, the one that it is based on, and so on, with their ids."""
        for _ in range(MOST_BASES):
            style = self._styles.get(style_id)
            if style is None:
                return
            yield style_id, style
            style_id = style.base

    def outline_level(self, properties: Any) -> int | None:
        """The level of a heading, from 0; `None` for other paragraphs."""
        own = value_of(properties, "w:outlineLvl")
        based = (style.outline for _, style in self.chain(self.id_of(properties)) if style.outline)
        return whole(own or next(based, ""), None)

    def is_hidden(self, run: Any, paragraph: Any) -> bool:
        """Whether a run is hidden text, by the properties (`None`: none) of it and its paragraph.

        If the styles of both hide text, it is shown: ECMA-376, part 1, 17.7.3.
        """
        own = _switch(run.find("w:vanish", NS)) if run is not None else ""
        by_run = value_of(run, "w:rStyle") if run is not None else ""
        styles = (self.chain(by_run), self.chain(self.id_of(paragraph)))
        hidden = [self._first(chain, "hidden") == "1" for chain in styles]
        return own == "1" if own else hidden[0] != hidden[1]

    def script(self, run: Any) -> str:
        """ "superscript" or "subscript" if the properties of a run, or its style, make it one in
        another way than mammoth knows; else "".
        """
        if run is None or value_of(run, "w:vertAlign"):
            return ""
        style_id = value_of(run, "w:rStyle")
        aligned = self._first(self.chain(style_id), "align")
        if aligned:
            return "" if aligned == "baseline" else aligned
        own = value_of(run, "w:position") or self._first(self.chain(style_id), "position")
        shift = int(own) if re.fullmatch(r"-?[0-9]{1,6}", own) else 0
        if abs(shift) < LEAST_POSITION:
            return ""
        return "superscript" if shift > 0 else "subscript"

    @staticmethod
    def _first(chain: Iterator[tuple[str, Style]], name: str) -> str:
        """The first value of that name that a style of the chain has; "" if none has one."""
        return next((value for _, style in chain if (value := getattr(style, name))), "")


def _style(element: Any) -> Style:
    properties = element.find("w:pPr", NS)
    list_id = level = outline = ""
    if properties is not None:
        outline = value_of(properties, "w:outlineLvl")
        list_id = value_of(properties, "w:numPr/w:numId")
        level = value_of(properties, "w:numPr/w:ilvl")
    hidden = _switch(element.find("w:rPr/w:vanish", NS))
    base = value_of(element, "w:basedOn")
    align = value_of(element, "w:rPr/w:vertAlign")
    position = value_of(element, "w:rPr/w:position")
    name = value_of(element, "w:name")
    return Style(name, base, outline, list_id, level, hidden, align, position)


def _switch(element: Any) -> str:
    """What an element that is a switch says: "1", "0", or "" if it is not there."""
    if element is None:
        return ""
    return "0" if element.get(f"{W}val") in ("0", "false", "off") else "1"


def value_of(element: Any, path: str) -> str:
    """The value of an inner element; "" if there is none."""
    found = element.find(path, NS)
    return "" if found is None else str(found.get(f"{W}val") or "")


def whole(value: str | None, otherwise: int | None) -> int | None:
    return int(value) if value and re.fullmatch(r"[0-9]{1,9}", value) else otherwise
