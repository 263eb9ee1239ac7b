"""Formulas (MathML, and Office's OMML) as one line of text: "(a+b)/2", "x^2", "sqrt(x)".

Children are joined by the name of their element. The elements come one by one, as a parser reads
them, so no tree is needed.
"""

from dataclasses import dataclass, field
from typing import Any

from lxml import etree

from .marks import lowered, power

# Elements with the same meaning in MathML and OMML.
_FRACTIONS = ("mfrac", "f")
_RAISED = ("msup", "mover", "sSup")
_LOWERED = ("msub", "munder", "sSub")
_BOTH = ("msubsup", "munderover", "sSubSup")
_ROOTS = ("msqrt", "rad")
# Texts beside a formula that repeat it in another form, and properties.
_SKIPPED = ("annotation", "annotation-xml", "ctrlPr", "deg")
# OMML keeps the parts of a construct in elements whose properties stand beside them.
_PROPERTIES = ("fPr", "sSupPr", "sSubPr", "sSubSupPr", "radPr", "rPr", "dPr", "naryPr", "mPr")


@dataclass(slots=True)
class _Element:
    name: str
    text: str = ""
    parts: list[str] = field(default_factory=list)  # of its children, in order


class Formula:
    """Takes the elements of one formula; `text` is what was closed so far."""

    def __init__(self) -> None:
        self._open = [_Element("")]
        self._skipped = 0  # open elements within one that is skipped

    @property
    def text(self) -> str:
        return " ".join("".join(self._open[0].parts).split())

    def start(self, name: str) -> None:
        """An element begins; `name` is without its namespace."""
        if self._skipped or name in _SKIPPED or name in _PROPERTIES:
            self._skipped += 1
        else:
            self._open.append(_Element(name))

    def data(self, text: str) -> None:
        """Text within the open element."""
        if not self._skipped:
            self._open[-1].text += text.strip()

    def end(self) -> None:
        """The open element ends."""
        if self._skipped:
            self._skipped -= 1
        elif len(self._open) > 1:
            element = self._open.pop()
            self._open[-1].parts.append(_joined(element))


def formula_text(element: Any) -> str:
    """The text of a formula that was parsed already, an element of lxml."""
    formula = Formula()
    for event, inner in etree.iterwalk(element, events=("start", "end")):
        if inner is element or not isinstance(inner.tag, str):
            continue
        if event == "start":
            formula.start(etree.QName(inner).localname)
            formula.data(inner.text or "")
        else:
            formula.end()
    return formula.text


def _joined(element: _Element) -> str:
    name = element.name
    parts = element.parts
    match (name, len(parts)):
        case (_, 0):
            return element.text
        case (_, 2) if name in _FRACTIONS:
            return f"{_bracketed(parts[0])}/{_bracketed(parts[1])}"
        case (_, 2) if name in _RAISED:
            return parts[0] + power(parts[1])
        case (_, 2) if name in _LOWERED:
            return parts[0] + lowered(parts[1], parts[0])
        case (_, 3) if name in _BOTH:
            return parts[0] + lowered(parts[1], parts[0]) + power(parts[2])
    if name in _ROOTS:
        return f"sqrt({''.join(parts)})"
    if name == "d":  # OMML leaves the brackets of an expression to its properties
        return f"({', '.join(parts)})"
    gap = {"mtr": ", ", "mtable": "; ", "mr": ", ", "m": "; "}.get(name, "")
    return gap.join(parts)


def _bracketed(text: str) -> str:
    return text if text.isalnum() else f"({text})"
