# ruff: noqa: E501 - inputs and what is expected of them, a case a line
"""A formula reads right on one line, from MathML and from Office's OMML: what stands above, below,
under a root or in a matrix is not a row of digits.
"""

import re

import pytest

from .read_files import book, text
from .sample_files import word


def row(letters: str) -> str:
    """MathML of single letters, digits and operators."""
    kinds = {True: "mn", False: "mo"}
    made = (
        f"<{k}>{c}</{k}>" for c in letters for k in ("mi" if c.isalpha() else kinds[c.isdigit()],)
    )
    return f"<mrow>{''.join(made)}</mrow>"


def of(name: str, *inner: str) -> str:
    """A MathML element of rows."""
    return f"<{name}>{''.join(one if one.startswith('<') else row(one) for one in inner)}</{name}>"


def matrix(*rows: str) -> str:
    """A table, whose cells are single characters, or parts between bars."""
    cells = (re.split(r"\|", line) if "|" in line else list(line) for line in rows)
    return of("mtable", *(of("mtr", *(of("mtd", cell) for cell in line)) for line in cells))


@pytest.mark.parametrize(
    ("formula", "expected"),
    [
        # fractions
        (of("mfrac", "3", "7"), "3/7"),
        (row("4") + of("mfrac", "3", "7"), "4 3/7"),
        (of("mfrac", "3", "7") + row("y"), "3/7 y"),
        (of("mfrac", "u+1", "5v"), "(u+1)/(5v)"),
        (of("mfrac", of("mfrac", "3", "7"), "2"), "(3/7)/2"),
        (of("msup", of("mfrac", "3", "7"), "2"), "(3/7)^2"),
        (of("mfrac", "du", "dt"), "du/dt"),
        ("<mfrac linethickness='0'><mi>m</mi><mn>4</mn></mfrac>", "binom(m, 4)"),
        # roots
        (of("msqrt", "u", "+", "4"), "sqrt(u+4)"),
        (of("mroot", "u", "5"), "root(5)(u)"),
        (row("3") + of("msqrt", "2"), "3sqrt(2)"),
        # scripts
        (of("msup", "u+v", "3"), "(u+v)^3"),
        (of("msup", row("(u+v)"), "3"), "(u+v)^3"),
        (of("msubsup", "u", "1", "2") + row("v"), "u_1^2v"),
        (of("msup", "<mn>10</mn>", "-7") + row("5"), "10^-7 5"),
        (of("msub", "<mi>lg</mi>", "3") + row("9"), "lg_3 9"),
        (of("msub", "N", "2") + of("msub", "O", "4"), "N2O4"),
        (of("msup", "f", "\u2032") + row("(u)"), "f\u2032(u)"),
        (of("msup", "<mi>cos</mi>", "2") + row("u"), "cos^2 u"),
        ("<mmultiscripts><mi>U</mi><none/><none/><mprescripts/><mn>92</mn><mn>235</mn></mmultiscripts>", "^235_92U"),
        # sums and limits
        (of("munderover", "\u2211", "k=0", "m") + row("k"), "sum_(k=0)^m k"),
        (of("msubsup", "\u222b", "0", "1") + of("msup", "u", "2"), "int_0^1 u^2"),
        (of("munder", "<mo>lim</mo>", "n\u2192\u221e") + of("msub", "a", "n"), "lim_(n\u2192\u221e) a_n"),
        (of("munder", "<mi>max</mi>", "i") + row("u"), "max_i u"),
        (of("mover", "u", "\u00af"), "bar(u)"),
        (of("mover", "AB", "\u2192"), "vec(AB)"),
        (of("mover", "=", "?"), "=^?"),
        # matrices, cases and equations over lines
        (row("(") + matrix("12", "34", "56") + row(")"), "(1, 2; 3, 4; 5, 6)"),
        (row("M=") + matrix("12", "34"), "M=[1, 2; 3, 4]"),
        (row("|u|={") + matrix("u|<mtext>if</mtext>", "0|<mtext>else</mtext>"), "|u|={u, if; 0, else"),
        (matrix("u|=v+1", "|=7"), "u=v+1; =7"),
        # words, spaces, brackets, what is not seen
        ("<mi>sin</mi><mo>\u2061</mo><mi>u</mi>", "sin u"),
        ("<mn>3</mn><mtext>if</mtext><mi>u</mi>", "3 if u"),
        ("<mfenced open='[' separators=';'><mi>u</mi><mi>v</mi></mfenced>", "[u ; v)"),
        ("<mn>3</mn><mo>\u2062</mo><mn>4</mn><mphantom><mn>5</mn></mphantom>", "3 4"),
        ("<semantics><mi>F</mi><annotation encoding='application/x-tex'>F=ma</annotation></semantics>", "F"),
        ("x", "x"),
        ("<mrow>u<mo>+</mo>v</mrow>", "u+v"),
    ],
)  # fmt: skip
def test_a_formula_of_a_page_reads_right_on_one_line(formula: str, expected: str) -> None:
    assert text("a.html", f"<p>so <math>{formula}</math>") == f"so {expected}"


def test_a_formula_of_a_book_is_read_by_the_same_rules() -> None:
    space = 'xmlns:m="http://www.w3.org/1998/Math/MathML"'
    formula = f"<m:math {space}><m:mfrac><m:mn>2</m:mn><m:mn>3</m:mn></m:mfrac></m:math>"
    assert text("a.epub", book(f"<p>about {formula} of it</p>")) == "about 2/3 of it"


def m(name: str, *inner: str, said: str = "") -> str:
    """An OMML element with properties."""
    properties = f"<m:{name}Pr>{said}<m:ctrlPr/></m:{name}Pr>" if said else ""
    return f"<m:{name}>{properties}{''.join(inner)}</m:{name}>"


def t(words: str) -> str:
    """An OMML run."""
    return f"<m:r><w:rPr><w:i/></w:rPr><m:t>{words}</m:t></m:r>"


def e(words: str) -> str:
    """An OMML argument."""
    return m("e", t(words))


@pytest.mark.parametrize(
    ("formula", "expected"),
    [
        (m("f", m("num", t("3")), m("den", t("7"))), "3/7"),
        (m("f", m("num", t("u+1")), m("den", t("5v"))), "(u+1)/(5v)"),
        (m("d", m("e", m("f", m("num", t("n")), m("den", t("4")), said="<m:type m:val='noBar'/>"))), "(binom(n, 4))"),
        (m("rad", m("deg"), e("u+4"), said="<m:degHide m:val='1'/>"), "sqrt(u+4)"),
        (m("rad", m("deg", t("5")), e("u")), "root(5)(u)"),
        (m("sSup", e("u+v"), m("sup", t("3"))), "(u+v)^3"),
        (m("sSub", e("log"), m("sub", t("2"))) + t("8"), "log_2 8"),
        (m("sSubSup", e("u"), m("sub", t("1")), m("sup", t("2"))), "u_1^2"),
        (m("sPre", m("sub", t("92")), m("sup", t("235")), e("U")), "^235_92U"),
        (m("nary", m("sub", t("k=0")), m("sup", t("m")), e("k"), said="<m:chr m:val='\u2211'/>"), "sum_(k=0)^m k"),
        (m("nary", m("sub", t("0")), m("sup", t("1")), e("u")), "int_0^1 u"),
        (m("func", m("fName", m("limLow", e("lim"), m("lim", t("n\u21920")))), e("u")), "lim_(n\u21920) u"),
        (m("func", m("fName", t("sin")), e("u")), "sin u"),
        (m("acc", e("u"), said="<m:chr m:val='\u0303'/>") + m("bar", e("v")), "tilde(u)bar(v)"),
        (m("d", m("e", m("m", m("mr", e("1"), e("2")), m("mr", e("3"), e("4")))), said="<m:begChr m:val='['/><m:endChr m:val=']'/>"), "[1, 2; 3, 4]"),
        (m("m", m("mr", e("1"), e("2")), m("mr", e("3"), e("4"))), "[1, 2; 3, 4]"),
        (m("d", e("u"), e("v"), said="<m:sepChr m:val=','/>"), "(u, v)"),
        (m("phant", e("u"), said="<m:show m:val='0'/>") + t("v"), "v"),
        ("<w:del><m:r><m:t>9</m:t></m:r></w:del>" + t("v"), "v"),
    ],
)  # fmt: skip
def test_a_formula_of_a_word_file_reads_right_on_one_line(formula: str, expected: str) -> None:
    space = 'xmlns:m="http://schemas.openxmlformats.org/officeDocument/2006/math"'
    body = f"<w:p><w:r><w:t>so </w:t></w:r><m:oMath {space}>{formula}</m:oMath></w:p>"
    assert text("a.docx", word(body)) == f"so {expected}"
