"""The numbers of paragraphs in Word files, as Word computes them from styles and numbering.xml.

A paragraph belongs to a list (`numId`) at a level, by its own properties or by its style. Lists of
one abstract list count on from each other, unless one of them has a start of its own.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ..marks import Kind, number_text

NS = {"w": "http://schemas.openxmlformats.org/wordprocessingml/2006/main"}
W = f"{{{NS['w']}}}"
MOST_LEVELS = 9
# So many styles are looked through for what one of them is based on.
MOST_BASES = 20
_KINDS: Mapping[str, Kind] = {
    "lowerLetter": "repeated",
    "upperLetter": "REPEATED",
    "lowerRoman": "roman",
    "upperRoman": "ROMAN",
    "decimalZero": "padded",
}
BULLET = "-"
NO_LIST = "0"


@dataclass(frozen=True, slots=True)
class Label:
    """The number or bullet of a paragraph."""

    text: str
    level: int  # of its list, from 0


@dataclass(frozen=True, slots=True)
class Style:
    """What a paragraph or a character gets from its style alone."""

    name: str = ""
    base: str = ""
    outline: str = ""  # level, from "0"
    list_id: str = ""
    level: str = ""
    hidden: str = ""  # "1" or "0" if the style says so


@dataclass(frozen=True, slots=True)
class _Level:
    start: int = 1
    format: str = "decimal"
    text: str = ""
    restarts: bool = True
    is_decimal: bool = False  # all numbers are decimals here, also those of the levels above


@dataclass(frozen=True, slots=True)
class _List:
    """A list of numbering.xml."""

    abstract: str
    levels: Mapping[int, _Level]  # its own
    starts: Mapping[int, int]  # its own


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
        return (_value(properties, "w:pStyle") if properties is not None else "") or self._default

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
        own = _value(properties, "w:outlineLvl")
        based = (style.outline for _, style in self.chain(self.id_of(properties)) if style.outline)
        return _whole(own or next(based, ""), None)

    def is_hidden(self, properties: Any) -> bool:
        """Whether a run with these properties is hidden text."""
        if properties is None:
            return False
        own = _switch(properties.find("w:vanish", NS))
        style_id = _value(properties, "w:rStyle")
        based = (style.hidden for _, style in self.chain(style_id) if style.hidden)
        return (own or next(based, "")) == "1"


class Numbering:
    """Counts the paragraphs of a file, which must be given in their order."""

    def __init__(self, root: Any, styles: Styles) -> None:
        self._styles = styles
        self._abstract = dict[str, dict[int, _Level]]()
        self._of_style = dict[tuple[str, str], int]()  # abstract list and style -> level
        links = dict[str, str]()  # abstract list -> the style whose list it is
        for one in root.iterfind("w:abstractNum", NS):
            abstract = str(one.get(f"{W}abstractNumId"))
            self._abstract[abstract] = _levels(one)
            if link := _value(one, "w:numStyleLink"):
                links[abstract] = link
            for level in one.iterfind("w:lvl", NS):
                if style := _value(level, "w:pStyle"):
                    at = _whole(level.get(f"{W}ilvl"), 0) or 0
                    self._of_style[(abstract, style)] = at
        self._lists = {str(one.get(f"{W}numId")): _list(one) for one in root.iterfind("w:num", NS)}
        for abstract, style_id in links.items():
            for _, based in styles.chain(style_id):
                if based.list_id in self._lists:
                    linked = self._lists[based.list_id].abstract
                    self._abstract[abstract] = self._abstract.get(linked, {})
                    break
        self._counts = dict[str, dict[int, int]]()  # abstract list -> level -> number
        self._begun = set[tuple[str, int]]()  # lists and levels whose own start was used

    def label(self, properties: Any) -> Label | None:
        """The label of the next paragraph; `None` if it is in no list."""
        list_id, level = self._place(properties)
        found = self._lists.get(list_id)
        if found is None or not 0 <= level < MOST_LEVELS:
            return None
        levels = {**self._abstract.get(found.abstract, {}), **found.levels}
        own = levels.get(level)
        if own is None:
            return None
        counts = self._counts.setdefault(found.abstract, {})
        if level in found.starts and (list_id, level) not in self._begun:
            self._begun.add((list_id, level))
            counts[level] = found.starts[level]
        else:
            counts[level] = counts[level] + 1 if level in counts else own.start
        for below in range(level + 1, MOST_LEVELS):
            if levels.get(below, _Level()).restarts:
                counts.pop(below, None)
        return Label(_label_text(levels, level, counts), level)

    def _place(self, properties: Any) -> tuple[str, int]:
        """The list and the level of a paragraph, by itself or by its style; ("", 0): none."""
        own = properties.find("w:numPr", NS) if properties is not None else None
        list_id = _value(own, "w:numId") if own is not None else ""
        level = _value(own, "w:ilvl") if own is not None else ""
        if not list_id:
            for style_id, style in self._styles.chain(self._styles.id_of(properties)):
                if style.list_id:
                    list_id = style.list_id
                    abstract = self._lists[list_id].abstract if list_id in self._lists else ""
                    linked = self._of_style.get((abstract, style_id))
                    level = level or (style.level if linked is None else str(linked))
                    break
        return ("", 0) if list_id in ("", NO_LIST) else (list_id, _whole(level, 0) or 0)


def _label_text(levels: Mapping[int, _Level], level: int, counts: Mapping[int, int]) -> str:
    own = levels[level]
    if own.format == "bullet":
        return BULLET
    if own.format == "none" and "%" not in own.text:
        return own.text.strip()

    def number(found: re.Match[str]) -> str:
        at = int(found.group(1)) - 1
        shown = levels.get(at, _Level())
        count = counts.get(at, shown.start)
        if shown.format == "none":
            return ""
        if own.is_decimal:
            return str(count)
        if shown.format == "ordinal":
            return f"{count}{_ordinal(count)}"
        return number_text(count, _KINDS.get(shown.format, "decimal"))

    return re.sub(r"%([1-9])", number, own.text).strip()


def _ordinal(number: int) -> str:
    if number % 100 in (11, 12, 13):
        return "th"
    return {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")


def _style(element: Any) -> Style:
    properties = element.find("w:pPr", NS)
    list_id = level = outline = ""
    if properties is not None:
        outline = _value(properties, "w:outlineLvl")
        list_id = _value(properties, "w:numPr/w:numId")
        level = _value(properties, "w:numPr/w:ilvl")
    hidden = _switch(element.find("w:rPr/w:vanish", NS))
    base = _value(element, "w:basedOn")
    return Style(_value(element, "w:name"), base, outline, list_id, level, hidden)


def _levels(element: Any) -> dict[int, _Level]:
    return {
        _whole(one.get(f"{W}ilvl"), 0) or 0: _Level(
            start=_whole(_value(one, "w:start"), 0) or 0,
            format=_value(one, "w:numFmt") or "decimal",
            text=_value(one, "w:lvlText"),
            restarts=_value(one, "w:lvlRestart") != "0",
            is_decimal=one.find("w:isLgl", NS) is not None,
        )
        for one in element.iterfind("w:lvl", NS)
    }


def _list(element: Any) -> _List:
    starts = dict[int, int]()
    levels = dict[int, _Level]()
    for override in element.iterfind("w:lvlOverride", NS):
        level = _whole(override.get(f"{W}ilvl"), 0) or 0
        start = _whole(_value(override, "w:startOverride"), None)
        if start is not None:
            starts[level] = start
        for own in _levels(override).values():
            levels[level] = own
    return _List(_value(element, "w:abstractNumId"), levels, starts)


def _switch(element: Any) -> str:
    """What an element that is a switch says: "1", "0", or "" if it is not there."""
    if element is None:
        return ""
    return "0" if element.get(f"{W}val") in ("0", "false", "off") else "1"


def _value(element: Any, path: str) -> str:
    """The value of an inner element; "" if there is none."""
    found = element.find(path, NS)
    return "" if found is None else str(found.get(f"{W}val") or "")


def _whole(value: str | None, otherwise: int | None) -> int | None:
    return int(value) if value and re.fullmatch(r"[0-9]{1,9}", value) else otherwise
