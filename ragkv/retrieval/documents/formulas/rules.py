"""Turns each element of a formula into text, by one rule for each name of MathML and of OMML."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from ..marks import Part, Place, grouped
from .texts import NOTHING, Edge, FormulaText, beside, single

# Operators that have a name on one line, and accents.
_NAMES = {
    "∑": "sum",
    "∏": "prod",
    "∐": "coprod",
    "∫": "int",
    "∬": "iint",
    "∭": "iiint",
    "∮": "oint",
}
_ACCENTS = {
    **dict.fromkeys("¯‾_\u0304\u0305", "bar"),
    **dict.fromkeys("^ˆ\u0302", "hat"),
    **dict.fromkeys("~˜\u0303", "tilde"),
    **dict.fromkeys("→⃗\u20d7", "vec"),
    **dict.fromkeys("˙.\u0307", "dot"),
    **dict.fromkeys("¨\u0308", "ddot"),
}
# What connects the parts of a formula without being seen, and braces over or under a part.
_INVISIBLE = dict.fromkeys(map(ord, "\u2061\u2062\u2064\u200b⏞⏟⏜⏝⎴⎵"), "") | {0x2063: ","}
# Marks that stand behind a letter as they are, and denominators that are read as one.
_PRIMES = frozenset("′″‴⁗'*†")
_DIFFERENTIAL = re.compile(r"[d∂]\w")
# Operators before which a cell of an equation over several lines goes on.
_RELATIONS = tuple("=<>≤≥≠≈≡∼∝⇒⇔→")


@dataclass(slots=True)
class FormulaElement:
    """An element that was read."""

    name: str
    attributes: Mapping[str, str]
    texts: list[str] = field(default_factory=list)
    # by their names, in order
    children: list[tuple[str, FormulaText]] = field(default_factory=list)
    said: dict[str, str] = field(default_factory=dict)  # by the properties beside them (OMML)

    def take_text(self) -> None:
        """Make a child of the text that stands beside children."""
        if self.text.strip():
            self.children.append(("", token(self)))
        self.texts = []

    @property
    def text(self) -> str:
        """What stands directly in it."""
        return "".join(self.texts)

    def named(self, name: str) -> FormulaText:
        """The child of that name (OMML)."""
        return next((text for found, text in self.children if found == name), NOTHING)

    def at(self, number: int) -> FormulaText:
        """The child at a place (MathML)."""
        return self.children[number][1] if number < len(self.children) else NOTHING


def token(element: FormulaElement) -> FormulaText:
    """Letters, a number, an operator, words."""
    text = " ".join(element.text.translate(_INVISIBLE).split())
    if element.name == "mspace":
        return single(" ")
    if not text:
        return NOTHING
    name = _NAMES.get(text, text)
    is_word = name.isalpha() and len(name) > 1 and name.isascii()
    is_words = element.name == "mtext" or " " in name
    is_one = name.isalpha() or len(name) == 1 or name.replace(".", "").isdigit()
    return single(name, is_one, Edge.WORD if is_word or is_words else Edge.PLAIN)


def row(element: FormulaElement) -> FormulaText:
    """Children beside each other."""
    texts = [text for _, text in element.children if text.parts]
    if len(texts) == 1:
        return texts[0]
    return beside(texts)


def _fraction(element: FormulaElement) -> FormulaText:
    return _over(element.at(0), element.at(1), element.attributes.get("linethickness", ""))


def _office_fraction(element: FormulaElement) -> FormulaText:
    bar = "0" if element.said.get("type") == "noBar" else ""
    return _over(element.named("num"), element.named("den"), bar)


def _over(above: FormulaText, below: FormulaText, bar: str) -> FormulaText:
    if bar.strip("0.") in ("", "px", "pt", "em") and bar:  # no line is drawn
        return single(f"binom({above.line()}, {below.line()})")
    first = above.line()
    shown = first if first.isalnum() else above.one()
    second = below.line()
    second = second if _DIFFERENTIAL.fullmatch(second) else below.one()
    return single(f"{shown}/{second}", is_one=False, edge=Edge.FRACTION)


def _root(element: FormulaElement) -> FormulaText:
    return _rooted(element.at(0), element.at(1))


def _square_root(element: FormulaElement) -> FormulaText:
    return _rooted(row(element), NOTHING)


def _office_root(element: FormulaElement) -> FormulaText:
    is_square = element.said.get("degHide", "0") in ("1", "on", "true", "")
    return _rooted(element.named("e"), NOTHING if is_square else element.named("deg"))


def _rooted(inner: FormulaText, degree: FormulaText) -> FormulaText:
    number = degree.line()
    return single(f"root({number})({inner.line()})" if number else f"sqrt({inner.line()})")


def _scripted(base: FormulaText, below: FormulaText, above: FormulaText) -> FormulaText:
    """A base with what is lowered and raised behind it."""
    text = base.line()
    if not below.parts and not above.parts:
        return base
    is_plain = base.is_one or len(text) == 1 or not text
    parts = list[Part](base.parts) if is_plain else [(f"({text})", Place.LINE)]
    for script, place in ((below, Place.LOWERED), (above, Place.EXPONENT)):
        if inner := script.line():
            parts.append((inner, Place.LINE if _PRIMES.issuperset(inner) else place))
    return FormulaText(parts, True, base.left, base.right)


def _limits(base: FormulaText, below: FormulaText, above: FormulaText) -> FormulaText:
    """A large operator, or an accent, with what stands below and above it."""
    text = base.line()
    low = below.line()
    high = above.line()
    accent = _ACCENTS.get(high) or _ACCENTS.get(low)
    if accent and not (low and high):
        return single(f"{accent}({text})")
    if not text.isalpha() and text not in _NAMES.values():
        return _scripted(base, below, above)
    shown = f"{text}{f'_{grouped(low)}' if low else ''}{f'^{grouped(high)}' if high else ''}"
    return single(shown, edge=Edge.FRACTION if low or high else Edge.WORD)


def _is_large(base: FormulaText) -> bool:
    return base.line() in _NAMES.values()


def _sub_and_sup(base: FormulaText, below: FormulaText, above: FormulaText) -> FormulaText:
    return (_limits if _is_large(base) else _scripted)(base, below, above)


def _before(element: FormulaElement) -> FormulaText:
    """OMML's scripts before a base, as of an isotope."""
    return _with_scripts(element.named("e"), (), (element.named("sub"), element.named("sup")))


def _many_scripts(element: FormulaElement) -> FormulaText:
    """MathML's pairs of scripts behind a base, and before it."""
    names = [name for name, _ in element.children]
    texts = [text for _, text in element.children]
    split = names.index("mprescripts") if "mprescripts" in names else len(names)
    return _with_scripts(element.at(0), texts[1:split], texts[split + 1 :])


def _with_scripts(
    base: FormulaText, behind: Sequence[FormulaText], before: Sequence[FormulaText]
) -> FormulaText:
    lead = list[Part]()
    for lowered, raised in zip(before[::2], before[1::2], strict=False):
        lead += [(f"^{grouped(text)}", Place.LINE) for text in (raised.line(),) if text]
        lead += [(f"_{grouped(text)}", Place.LINE) for text in (lowered.line(),) if text]
    for lowered, raised in zip(behind[::2], behind[1::2], strict=False):
        base = _scripted(base, lowered, raised)
    return FormulaText([*lead, *base.parts], True, Edge.PLAIN, base.right)


def _large(element: FormulaElement) -> FormulaText:
    """OMML's sums and integrals."""
    mark = element.said.get("chr", "∫")
    name = single(_NAMES.get(mark, mark), edge=Edge.WORD)
    limits = _limits(name, element.named("sub"), element.named("sup"))
    return beside([limits, *(text for text in (element.named("e"),) if text.parts)])


def _fenced(element: FormulaElement) -> FormulaText:
    """Brackets that are attributes, or properties."""
    is_office = element.name == "d"
    names = ("begChr", "endChr", "sepChr") if is_office else ("open", "close", "separators")
    said = element.said if is_office else element.attributes
    start, end = (said.get(name, usual) for name, usual in zip(names, "()", strict=False))
    between = (said.get(names[2], "|" if is_office else ",").strip() or "")[:1]
    inner = [text.line() for _, text in element.children]
    gap = ", " if between == "," else f" {between} " if between else ""
    return single(f"{start}{gap.join(inner)}{end}", is_one=bool(start and end))


def _function(element: FormulaElement) -> FormulaText:
    name = element.named("fName")
    argument = element.named("e").line()
    gap = "" if argument.startswith("(") or not argument else " "
    return single(f"{name.line()}{gap}{argument}", is_one=False, edge=Edge.WORD)


def _table(element: FormulaElement) -> FormulaText:
    """A matrix, or an equation over several lines, whose rows are one each."""
    rows = [text for _, text in element.children if text.parts]
    text = "; ".join(row.line() for row in rows)
    is_equation = any(row.is_one for row in rows)
    return FormulaText([(text, Place.LINE)], is_matrix=not is_equation and len(rows) > 1)


def _table_row(element: FormulaElement) -> FormulaText:
    line = ""
    is_equation = False
    for _, cell in element.children:
        text = cell.line()
        goes_on = bool(line) and text.startswith(_RELATIONS)
        is_equation = is_equation or goes_on
        line += f"{', ' if line and text and not goes_on else ''}{text}"
    return single(line, is_one=is_equation)


def _accent(element: FormulaElement) -> FormulaText:
    mark = element.said.get("chr", "\u0302") if element.name == "acc" else "_"
    return single(f"{_ACCENTS.get(mark, 'bar')}({element.named('e').line()})")


def _first(element: FormulaElement) -> FormulaText:
    return element.at(0)


def _quoted(element: FormulaElement) -> FormulaText:
    return single(f'"{element.text.strip()}"')


def _unseen(element: FormulaElement) -> FormulaText:
    """OMML's phantoms are shown unless they say that they are not."""
    return NOTHING if element.said.get("show") in ("0", "off", "false") else element.named("e")


def _enclosed(element: FormulaElement) -> FormulaText:
    is_root = "radical" in element.attributes.get("notation", "")
    return _square_root(element) if is_root else row(element)


RULES: Mapping[str, Callable[[FormulaElement], FormulaText]] = {
    # MathML
    "mfrac": _fraction,
    "msqrt": _square_root,
    "mroot": _root,
    "menclose": _enclosed,
    "msub": lambda of: _sub_and_sup(of.at(0), of.at(1), NOTHING),
    "msup": lambda of: _sub_and_sup(of.at(0), NOTHING, of.at(1)),
    "msubsup": lambda of: _sub_and_sup(of.at(0), of.at(1), of.at(2)),
    "munder": lambda of: _limits(of.at(0), of.at(1), NOTHING),
    "mover": lambda of: _limits(of.at(0), NOTHING, of.at(1)),
    "munderover": lambda of: _limits(of.at(0), of.at(1), of.at(2)),
    "mmultiscripts": _many_scripts,
    "mfenced": _fenced,
    "mtable": _table,
    "mtr": _table_row,
    "mlabeledtr": _table_row,
    "semantics": _first,
    "maction": _first,
    "ms": _quoted,
    # OMML
    "f": _office_fraction,
    "rad": _office_root,
    "sSub": lambda of: _sub_and_sup(of.named("e"), of.named("sub"), NOTHING),
    "sSup": lambda of: _sub_and_sup(of.named("e"), NOTHING, of.named("sup")),
    "sSubSup": lambda of: _sub_and_sup(of.named("e"), of.named("sub"), of.named("sup")),
    "sPre": _before,
    "limLow": lambda of: _limits(of.named("e"), of.named("lim"), NOTHING),
    "limUpp": lambda of: _limits(of.named("e"), NOTHING, of.named("lim")),
    "nary": _large,
    "d": _fenced,
    "func": _function,
    "m": _table,
    "mr": _table_row,
    "eqArr": _table,
    "acc": _accent,
    "bar": _accent,
    "phant": _unseen,
}
