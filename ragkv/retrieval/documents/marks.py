"""Marks that must not run into the text next to them: numbers of items, raised and lowered text,
marks of notes.

It is one place for all formats, so that a raised number looks the same in a web page, a Word file,
a slide and a PDF.
"""

from typing import Literal

# Raised ends of words that are read as a part of them: "1st", "5e", "Mme", "TM".
ORDINALS = frozenset(
    {"st", "nd", "rd", "th"}
    | {"er", "re", "e", "ème", "eme", "ère", "me", "mme", "lle"}
    | {"o", "a", "º", "ª", "os", "as"}
    | {"TM", "SM", "R"}
)
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


def raised(text: str) -> str:
    """A superscript: "6" is "^6", "n+1" is "^(n+1)", "st" stays as it is."""
    return text if text in ORDINALS or not any(map(str.isalnum, text)) else power(text)


def power(text: str) -> str:
    """An exponent, also one that would be the end of a word."""
    return f"^{_grouped(text)}"


def lowered(text: str, before: str) -> str:
    """A subscript after the text `before`: "H2O" stays as people write it, the base in "101_2"
    must not become a digit.
    """
    if not text or not before[-1:].isdigit():
        return text
    return f"_{_grouped(text)}"


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


def _grouped(text: str) -> str:
    """A text of several parts in brackets, so that it is seen where it ends."""
    inner = text.removeprefix("-").removeprefix("\u2212")
    return text if inner.isalnum() or text.startswith("(") else f"({text})"
