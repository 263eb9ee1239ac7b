"""Lists of HTML: which mark each item has."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto

from ..marks import Kind, number_text

# Items of a list of this class have their numbers in their text:
# `ragkv.retrieval.documents.office.word`.
WRITTEN = "written"
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


class _Marks(Enum):
    """How a list marks its items."""

    NUMBERS = auto()
    BULLETS = auto()
    NOTHING = auto()  # the texts have them


@dataclass(slots=True)
class OpenList:
    """A list that is being read."""

    marks: _Marks
    kind: Kind = "decimal"
    number: int = 1  # of the next item
    step: int = 1

    def mark(self, attributes: Mapping[str, str]) -> str:
        """The mark of the next item, with a space."""
        if self.marks is not _Marks.NUMBERS:
            return "- " if self.marks is _Marks.BULLETS else ""
        self.number = _whole(attributes.get("value"), self.number)
        number = self.number
        self.number += self.step
        return f"{number_text(number, NUMBERS.get(attributes.get('type', ''), self.kind))}. "


def list_of(tag: str, attributes: Mapping[str, str]) -> OpenList:
    """The list that begins with an element `ol` or `ul`."""
    style = re.search(r"list-style(?:-type)?\s*:\s*([\w-]+)", attributes.get("style", "")[:1000])
    look = style.group(1).lower() if style else attributes.get("type", "1")
    if WRITTEN in attributes.get("class", "").split() or look == "none":
        return OpenList(_Marks.NOTHING)
    is_unknown = "reversed" in attributes and "start" not in attributes  # where it begins
    if tag == "ul" or is_unknown:
        return OpenList(_Marks.BULLETS)
    step = -1 if "reversed" in attributes else 1
    kind = NUMBERS.get(look, "decimal")
    return OpenList(_Marks.NUMBERS, kind, _whole(attributes.get("start"), 1), step)


def _whole(value: str | None, otherwise: int) -> int:
    found = re.match(r"([+-]?[0-9]{1,9})(?![0-9])", (value or "").lstrip())
    return int(found.group(1)) if found else otherwise
