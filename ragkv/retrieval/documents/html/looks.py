"""Reads from the styles of a page whether text is raised or lowered, and whether it is shown.

tinycss2 reads the declarations. In style sheets only rules count whose selector is one element with
a class, as programs that export pages write them. These rules only decide what is raised or
lowered, because text that they hide is often shown by a script or a click.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import tinycss2

from ..marks import Place

# So much of an element's own style is looked at.
STYLE_CHARS = 2000
# A shift below so many of each unit aligns a picture or a letter, and above the others moves a box.
LEAST_SHIFT = {"em": 0.15, "ex": 0.3, "rem": 0.15, "%": 15, "pt": 2, "px": 2}
MOST_SHIFT = {"em": 1.2, "ex": 2.4, "rem": 1.2, "%": 100, "pt": 14, "px": 18}
_NAME = re.compile(r"[\w-]+")
# Notes that a reader opens: books hide them, and programs for reading show them.
NOTES = frozenset({"footnote", "endnote", "rearnote", "doc-footnote", "doc-endnote"})


@dataclass(frozen=True, slots=True)
class Look:
    """What a style says; `None`: nothing about it."""

    place: Place | None = None
    is_hidden: bool = False


@dataclass(slots=True)
class Sheets:
    """The rules of a page's style sheets: (element or "", class or "#id") -> where its text
    stands.
    """

    beside: "Sheets | None" = None  # of other files; what is here counts more
    _places: dict[tuple[str, str], Place] = field(default_factory=dict)

    def add(self, css: str) -> None:
        """The rules of one more sheet; later ones count."""
        for names, style in _rules(css):
            if (place := _look(style).place) is not None:
                self._places.update(dict.fromkeys(names, place))

    def place(self, tag: str, attributes: Mapping[str, str]) -> Place | None:
        """Where a sheet puts the text of an element; `None`: none says it."""
        beside = self.beside.place(tag, attributes) if self.beside is not None else None
        if not self._places:
            return beside
        names = [*attributes.get("class", "").split(), f"#{attributes.get('id', '')}"]
        found = (self._places.get((of, name)) for name in names for of in (tag, ""))
        return next((place for place in found if place is not None), beside)


def look_of(attributes: Mapping[str, str]) -> Look:
    """What an element's own attributes say. Notes that a reader opens are shown."""
    look = _look(attributes.get("style", "")[:STYLE_CHARS])
    is_hidden = look.is_hidden or attributes.get("hidden", "until-found") != "until-found"
    if is_hidden and NOTES.intersection(
        f"{attributes.get('epub:type', '')} {attributes.get('role', '')}".split()
    ):
        is_hidden = False
    return Look(look.place, is_hidden)


def _rules(css: str) -> Iterator[tuple[list[tuple[str, str]], str]]:
    """The names in the selectors of each rule, and its declarations."""
    for rule in tinycss2.parse_stylesheet(css, skip_comments=True, skip_whitespace=True):
        if rule.type != "qualified-rule":
            continue
        selectors = tinycss2.serialize(rule.prelude).split(",")
        if names := [name for one in selectors if (name := _named(one.strip())) is not None]:
            yield names, tinycss2.serialize(rule.content)


def _named(selector: str) -> tuple[str, str] | None:
    """The element and the class, or the id, of a selector such as "span.raised"; `None`: it is no
    such selector.
    """
    mark = "." if "." in selector else "#"
    tag, _, name = selector.partition(mark)
    if not _NAME.fullmatch(name) or not (_NAME.fullmatch(tag) or not tag):
        return None
    return tag, name if mark == "." else f"#{name}"


@lru_cache(maxsize=1024)
def _look(style: str) -> Look:
    if ":" not in style:
        return Look()
    said = {
        one.lower_name: [value for value in one.value if value.type != "whitespace"]
        for one in tinycss2.parse_blocks_contents(style, skip_comments=True, skip_whitespace=True)
        if one.type == "declaration"
    }
    is_hidden = _word(said.get("display")) == "none" or _word(said.get("visibility")) in (
        "hidden",
        "collapse",
    )
    return Look(_place(said), is_hidden)


def _place(said: Mapping[str, list[Any]]) -> Place | None:
    align = said.get("vertical-align")
    match _word(align):
        case "super":
            return Place.RAISED
        case "sub":
            return Place.LOWERED
        case "baseline" if "position" not in said:
            return Place.LINE
    shift = _shift(align)
    if not shift and _word(said.get("position")) == "relative":
        shift = -_shift(said.get("top")) or _shift(said.get("bottom"))
    return None if not shift else Place.RAISED if shift > 0 else Place.LOWERED


def _shift(values: Iterable[Any] | None) -> float:
    """How far text is shifted, in any unit; 0 if it stands about on its line, or elsewhere."""
    value = next(iter(values or ()), None)
    unit = "%" if getattr(value, "type", "") == "percentage" else getattr(value, "lower_unit", "")
    if value is None or unit not in LEAST_SHIFT:
        return 0.0
    return value.value if LEAST_SHIFT[unit] <= abs(value.value) <= MOST_SHIFT[unit] else 0.0


def _word(values: Iterable[Any] | None) -> str:
    value = next(iter(values or ()), None)
    return value.lower_value if value is not None and value.type == "ident" else ""
