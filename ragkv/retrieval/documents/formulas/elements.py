"""Takes the elements of a formula one by one, as a parser reads them, so no tree is needed. Raised
and lowered parts keep their place until the end: `marks` has one rule for them.
"""

from collections.abc import Mapping
from typing import Any

from lxml import etree

from .rules import RULES, FormulaElement, row, token
from .texts import beside

# Texts beside a formula that repeat it in another form, and what is not shown.
SKIPPED = ("annotation", "annotation-xml", "mphantom", "ctrlPr", "rPr", "del", "moveFrom")


class Formula:
    """Takes the elements of one formula; `text` is what was closed so far."""

    def __init__(self) -> None:
        self._open = [FormulaElement("", {})]
        self._skipped = 0  # open elements within one that is skipped
        self._properties = 0  # open elements within properties

    @property
    def text(self) -> str:
        """The formula, on one line."""
        outer = self._open[0]
        outer.take_text()
        return " ".join(beside([text for _, text in outer.children]).line().split())

    def start(self, name: str, attributes: Mapping[str, str]) -> None:
        """An element begins; names are without their namespaces."""
        if self._skipped or name in SKIPPED:
            self._skipped += 1
        elif self._properties or name.endswith("Pr"):
            self._properties += 1
            self._open[-1].said[name] = attributes.get("val", "")
        else:
            self._open[-1].take_text()
            self._open.append(FormulaElement(name, attributes))

    def data(self, text: str) -> None:
        """Text within the open element."""
        if not self._skipped and not self._properties:
            self._open[-1].texts.append(text)

    def end(self) -> None:
        """The open element ends."""
        if self._skipped:
            self._skipped -= 1
        elif self._properties:
            self._properties -= 1
        elif len(self._open) > 1:
            element = self._open.pop()
            if element.children:
                element.take_text()
            rule = RULES.get(element.name, row if element.children else token)
            self._open[-1].children.append((element.name, rule(element)))


def formula_text(element: Any) -> str:
    """The text of a formula that was parsed already, an element of lxml."""
    formula = Formula()
    for event, inner in etree.iterwalk(element, events=("start", "end")):
        if inner is element or not isinstance(inner.tag, str):
            continue
        if event == "start":
            attributes = {etree.QName(name).localname: value for name, value in inner.items()}
            formula.start(etree.QName(inner).localname, attributes)
            formula.data(inner.text or "")
        else:
            formula.end()
            formula.data(inner.tail or "")
    return formula.text
