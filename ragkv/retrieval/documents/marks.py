"""Marks that must not run into the text next to them: numbers of items, raised and lowered text,
marks of notes.

All formats use this module, so that a raised number looks the same in a web page, a formula, a Word
file, a slide, a sheet and a PDF.
"""

import re
from collections.abc import Iterable, Iterator
from enum import Enum, auto
from itertools import groupby
from typing import Literal

# Raised ends that are read as a part of the number or word before them: "1st", "5e", "Mme", "TM".
ORDINALS = frozenset(
    {"st", "nd", "rd", "th"}
    | {"er", "re", "e", "ème", "eme", "ère", "me"}
    | {"o", "a", "º", "ª", "os", "as"}
)
ENDINGS = frozenset({"me", "mme", "lle", "o", "os", "r", "º", "ª", "TM", "SM"})
# A number, perhaps with a letter, as in "PM2.5" and "HbA1c".
_NUMBER = re.compile(r"\d+(?:[.,]\d+)?[a-z]?")
Kind = Literal["decimal", "padded", "letter", "LETTER", "repeated", "REPEATED", "roman", "ROMAN"]
_ROMAN = (
    (1000, "m"),
    (900, "cm"),
    (500, "d"),
    (400, "cd"),
    (100, "c"),
    (90, "xc"),
    (50, "l"),
    (40, "xl"),
    (10, "x"),
    (9, "ix"),
    (5, "v"),
    (4, "iv"),
    (1, "i"),
)
# Larger numbers are written as decimals in all kinds.
MOST_ROMAN = 3999
MOST_LETTERS = 26 * 26


class Place(Enum):
    """Where a part of a text stands."""

    LINE = auto()
    RAISED = auto()
    LOWERED = auto()
    EXPONENT = auto()  # raised in a formula, where no part is the end of a word


Part = tuple[str, Place]


def joined(parts: Iterable[Part]) -> str:
    """Parts that follow each other as one text, in which raised and lowered ones have their marks.

    A line that is raised or lowered as a whole has no mark: nothing stands above or below anything.
    """
    merged = [
        ("".join(text for text, _ in group), place)
        for place, group in groupby((part for part in parts if part[0]), key=lambda part: part[1])
    ]
    return "".join(_marked(merged))


def _marked(merged: list[Part]) -> Iterator[str]:
    base = ""  # the text on the line that a script belongs to
    for at, (text, place) in enumerate(merged):
        following = merged[at + 1 : at + 2]
        after = following[0][0] if following and following[0][1] is Place.LINE else ""
        if place is Place.LINE:
            base = text
            yield text
            continue
        inner = text.strip()
        start = len(text) - len(text.lstrip())
        end = text[start + len(inner) :]
        follows = end or after
        is_whole = not at or base.endswith("\n") or "\n" in text[:start]
        is_last = not follows and not following
        if not inner or (is_whole and (is_last or follows.startswith("\n"))):
            yield text
        else:
            before = "" if start else base
            mark = _script(inner, place, before, follows)
            gap = " " if _runs_on(mark, follows, is_marked=mark != inner) else ""
            yield f"{text[:start]}{mark}{gap}{end}"
        if end:
            base = end


def _script(text: str, place: Place, before: str, after: str) -> str:
    if place is Place.LOWERED:
        return lowered(text, before, after)
    return power(text) if place is Place.EXPONENT else raised(text, before)


def raised(text: str, before: str) -> str:
    """A superscript after the text `before`: "6" becomes "^6", and "n+1" becomes "^(n+1)".

    The ending of a number, such as "st", and a mark such as "[2]" stay as they are.
    """
    endings = ORDINALS if before[-1:].isdigit() else ENDINGS if before[-1:].isalpha() else ()
    is_bracketed = text.startswith("[") and text.endswith("]")
    if text in endings or is_bracketed or not any(map(str.isalnum, text)):
        return text
    return power(text)


def power(text: str) -> str:
    """An exponent, also one that would be the end of a word."""
    return f"^{grouped(text)}"


def lowered(text: str, before: str, after: str = "") -> str:
    """A subscript between two texts. A number stays as people write it behind a capital or a
    bracket: "H2O", "B12", "Ca(OH)2". All else has its mark: "x_1", "log_2 8", "a_n", "110_2".
    """
    if not before or before[-1].isspace():
        return text
    is_capital = before[-1].isupper() or (before[-1].islower() and before[-2:-1].isupper())
    is_open = after[:1].isdigit()
    if _NUMBER.fullmatch(text) and (is_capital or before[-1] in ")]") and not is_open:
        return text
    return f"_{grouped(text)}" if any(map(str.isalnum, text)) else text


def grouped(text: str) -> str:
    """A text of several parts in brackets, so that it is seen where it ends."""
    inner = text.removeprefix("-").removeprefix("\u2212")
    is_one = len(inner) == 1 or inner.isalnum() or bool(_NUMBER.fullmatch(inner))
    return text if is_one or is_bracketed(text) else f"({text})"


def is_bracketed(text: str) -> bool:
    """Whether the text begins with a bracket that closes at its end."""
    if not (text.startswith("(") and text.endswith(")")):
        return False
    depth = 0
    for at, char in enumerate(text, start=1):
        depth += (char == "(") - (char == ")")
        if depth <= 0 and at < len(text):
            return False
    return depth == 0


def _runs_on(text: str, after: str, is_marked: bool) -> bool:
    """Whether what follows a script would be read as a part of it: "x^n y", but "x^2y", "H2O"."""
    last = text[-1:]
    following = after[:1]
    if last.isdigit():
        return following.isdigit()
    return is_marked and last.isalnum() and following.isalnum()


def struck(text: str) -> str:
    """A text that is struck out, as in Markdown."""
    inner = text.strip()
    return text.replace(inner, f"~~{inner}~~", 1) if inner else text


def note_mark(label: str) -> str:
    """The mark of a note, as in Markdown, from what stands for it: "[2]" and "2" are "[^2]"."""
    return f"[^{label.strip('[]()^ ')}]"


def number_text(number: int, kind: Kind) -> str:
    """The number of an item: 3 is "3", "03", "c", "C", "iii" or "III". Letters after z are "aa"
    and "ab", repeated ones "aa" and "bb".
    """
    if kind == "padded":
        return f"{number:02}"
    low = kind.lower()
    text = str(number)
    if low == "roman" and 0 < number <= MOST_ROMAN:
        text = _roman(number)
    elif low == "letter" and 0 < number <= MOST_LETTERS:
        first, second = divmod(number - 1, 26)
        text = (chr(96 + first) if first else "") + chr(97 + second)
    elif low == "repeated" and 0 < number <= MOST_LETTERS:
        text = chr(97 + (number - 1) % 26) * ((number - 1) // 26 + 1)
    return text if kind == low else text.upper()


def _roman(number: int) -> str:
    found = ""
    for value, letters in _ROMAN:
        count, number = divmod(number, value)
        found += letters * count
    return found
