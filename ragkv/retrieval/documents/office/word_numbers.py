"""The numbers of paragraphs in Word files, as Word computes them from styles and numbering.xml.

A paragraph belongs to a list (`numId`) at a level, by its own properties or by its style. Lists of
one abstract list count on from each other, unless one of them has a start of its own.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..marks import Kind, number_text
from .word_styles import NS, Styles, W, value_of, whole

MOST_LEVELS = 9
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
            if link := value_of(one, "w:numStyleLink"):
                links[abstract] = link
            for level in one.iterfind("w:lvl", NS):
                if style := value_of(level, "w:pStyle"):
                    at = whole(level.get(f"{W}ilvl"), 0) or 0
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
        list_id = value_of(own, "w:numId") if own is not None else ""
        level = value_of(own, "w:ilvl") if own is not None else ""
        if not list_id:
            for style_id, style in self._styles.chain(self._styles.id_of(properties)):
                if style.list_id:
                    list_id = style.list_id
                    abstract = self._lists[list_id].abstract if list_id in self._lists else ""
                    linked = self._of_style.get((abstract, style_id))
                    level = level or (style.level if linked is None else str(linked))
                    break
        return ("", 0) if list_id in ("", NO_LIST) else (list_id, whole(level, 0) or 0)


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


def _levels(element: Any) -> dict[int, _Level]:
    return {
        whole(one.get(f"{W}ilvl"), 0) or 0: _Level(
            start=whole(value_of(one, "w:start"), 0) or 0,
            format=value_of(one, "w:numFmt") or "decimal",
            text=value_of(one, "w:lvlText"),
            restarts=value_of(one, "w:lvlRestart") != "0",
            is_decimal=one.find("w:isLgl", NS) is not None,
        )
        for one in element.iterfind("w:lvl", NS)
    }


def _list(element: Any) -> _List:
    starts = dict[int, int]()
    levels = dict[int, _Level]()
    for override in element.iterfind("w:lvlOverride", NS):
        level = whole(override.get(f"{W}ilvl"), 0) or 0
        start = whole(value_of(override, "w:startOverride"), None)
        if start is not None:
            starts[level] = start
        for own in _levels(override).values():
            levels[level] = own
    return _List(value_of(element, "w:abstractNumId"), levels, starts)
