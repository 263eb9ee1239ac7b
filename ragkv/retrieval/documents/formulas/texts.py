"""Puts parts of a formula next to each other: "2 1/2", "sin x", "(a+b)/2"."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

from ..marks import Part, Place, is_bracketed, joined

# Brackets behind which a matrix needs none of its own.
_OPENING = tuple("([{|‖⟨")


class Edge(IntEnum):
    """How a text stands beside the next: what would be misread together stands apart."""

    PLAIN = 0
    WORD = 1  # apart from letters and digits
    FRACTION = 2  # apart from brackets, too


@dataclass(frozen=True, slots=True)
class FormulaText:
    """A part of a formula."""

    parts: Sequence[Part]
    is_one: bool = False  # it needs no brackets beside an operator
    left: Edge = Edge.PLAIN
    right: Edge = Edge.PLAIN
    is_matrix: bool = False  # it needs brackets where none stand before it

    def line(self) -> str:
        """It as a text of its own."""
        return joined(self.parts)

    def one(self) -> str:
        """It in brackets, if it needs them."""
        text = self.line()
        return text if self.is_one or not text else f"({text})"


NOTHING = FormulaText(())


def single(text: str, is_one: bool = True, edge: Edge = Edge.PLAIN) -> FormulaText:
    return FormulaText([(text, Place.LINE)], is_one, edge, edge)


def beside(texts: Sequence[FormulaText]) -> FormulaText:
    parts = list[Part]()
    before: FormulaText | None = None
    for text in texts:
        if not text.parts:
            continue
        if before is not None and _apart(before, text):
            parts.append((" ", Place.LINE))
        is_open = bool(parts) and parts[-1][0][-1:] in _OPENING
        if text.is_matrix and not is_open:
            parts += (("[", Place.LINE), *text.parts, ("]", Place.LINE))
        else:
            parts += text.parts
        before = text
    if before is None:
        return NOTHING
    return FormulaText(
        parts, is_bracketed("".join(text for text, _ in parts)), texts[0].left, texts[-1].right
    )


def _apart(before: FormulaText, after: FormulaText) -> bool:
    """Whether a space stands between two texts."""
    last = before.parts[-1][0][-1:]
    first = after.parts[0][0][:1]
    edge = max(before.right, after.left)
    if edge is Edge.FRACTION:
        return (last.isalnum() or last in ")]}∞") and (first.isalnum() or first in "([{√")
    is_glued = last.isalnum() and first.isalnum()
    return is_glued and (edge is Edge.WORD or (last.isdigit() and first.isdigit()))
