"""Text in a layer that is off when a PDF is opened is left out and told, wherever a file says in
which layer it is.
"""

import pytest

from ragkv.retrieval.documents.pdf.layers import MOST_CONDITIONS, Layers

from .pdf_files import pdf_of, text_at
from .read_files import lost, read

# The objects of a file: two layers, a membership, a form.
ON, OFF, MEMBER, FORM = "100 0 R", "101 0 R", "102 0 R", "103 0 R"
FIRST = "<< /Type /OCG /Name (Plan) >>"
SECOND = "<< /Type /OCG /Name (Draft) >>"
USED = f"/Properties << /L1 {ON} /L2 {OFF} /M {MEMBER} >> /XObject << /X {FORM} >>"


def marked(name: str, operators: str) -> str:
    return f"/OC /{name} BDC {operators} EMC"


def form(operators: str, entries: str = "") -> str:
    own = f"/Resources << /Font << /F1 3 0 R >> /Properties << /L2 {OFF} >> >> {entries}"
    head = f"<< /Type /XObject /Subtype /Form /BBox [0 0 612 792] {own} /Length {len(operators)} >>"
    return f"{head}\nstream\n{operators}\nendstream"


def layered(
    shown: str,
    config: str = f"/OFF [{OFF}]",
    member: str = "null",
    inner: str = "null",
    second: str = SECOND,
    page: str = "",
) -> bytes:
    catalog = f"/OCProperties << /OCGs [{ON} {OFF}] /D << {config} >> >>"
    objects = [FIRST, second, member, inner]
    return pdf_of(shown, objects=objects, catalog=catalog, resources=USED, page=page)


VALID = text_at(700, "Valid")
DRAFT = text_at(680, "Not yet")
TOLD = "layers that are off: Draft"
IN_FORM = f"{VALID} /X Do"
BY_MEMBER = f"{VALID} {marked('M', DRAFT)}"


@pytest.mark.parametrize(
    ("data", "expected", "told"),
    [
        # in the page
        (layered(f"{marked('L1', VALID)} {marked('L2', DRAFT)}"), "Valid", TOLD),
        (layered(f"{VALID} {marked('L2', DRAFT)}", "/BaseState /OFF /ON [100 0 R]"), "Valid", TOLD),
        (layered(f"{VALID} {marked('L2', DRAFT)}", ""), "Valid\nNot yet", ""),
        # another layer of the same name is on
        (
            layered(f"{marked('L1', VALID)} {marked('L2', DRAFT)}", second=FIRST),
            "Valid",
            "layers that are off: Plan",
        ),
        # for printing alone
        (
            layered(
                f"{VALID} {marked('L2', DRAFT)}",
                f"/AS [<< /Event /View /Category [/View] /OCGs [{OFF}] >>]",
                second="<< /Type /OCG /Name (Draft) /Usage << /View << /ViewState /OFF >> >> >>",
            ),
            "Valid",
            TOLD,
        ),
        # in a form, and a form as a whole
        (layered(IN_FORM, inner=form(marked("L2", DRAFT))), "Valid", TOLD),
        (layered(IN_FORM, inner=form(f"{marked('L2', VALID)} {DRAFT}")), "Valid\nNot yet", TOLD),
        (layered(IN_FORM, inner=form(DRAFT, f"/OC {OFF}")), "Valid", TOLD),
        (layered(IN_FORM, inner=form(DRAFT, f"/OC {ON}")), "Valid\nNot yet", ""),
        # a text that was typed onto the page
        (
            layered(VALID, page=f"/Annots [{FORM}]",
                    inner=f"<< /Type /Annot /Subtype /FreeText /Contents (Not yet) /OC {OFF} >>"),
            "Valid",
            TOLD,
        ),
    ],
)  # fmt: skip
def test_what_is_in_a_layer_that_is_off_is_left_out(data: bytes, expected: str, told: str) -> None:
    document = read("a.pdf", data)
    assert (document.text, lost(document)) == (expected, told)


@pytest.mark.parametrize(
    ("says", "is_shown"),
    [
        (f"/OCGs {OFF}", False),
        (f"/OCGs {ON}", True),
        (f"/OCGs [{ON} {OFF}]", True),
        (f"/OCGs [{ON} {OFF}] /P /AllOn", False),
        (f"/OCGs [{ON} {OFF}] /P /AnyOff", True),
        (f"/OCGs [{ON}] /P /AnyOff", False),
        (f"/OCGs [{OFF}] /P /AllOff", True),
        ("/OCGs []", True),
        (f"/OCGs {ON} /VE [/Not {ON}]", False),
        (f"/VE [/And {ON} [/Not {OFF}]]", True),
        (f"/VE [/Or [/Not {ON}] {OFF}]", False),
    ],
)
def test_a_membership_in_layers_shows_what_it_says(says: str, is_shown: bool) -> None:
    document = read("a.pdf", layered(BY_MEMBER, member=f"<< /Type /OCMD {says} >>"))
    assert document.text == ("Valid\nNot yet" if is_shown else "Valid")
    assert bool(lost(document)) != is_shown


def test_layers_that_cannot_be_read_are_told_and_the_text_is_read() -> None:
    document = read("a.pdf", pdf_of(VALID, catalog="/OCProperties << /OCGs [7] >>"))
    assert (document.text, lost(document)[:8]) == ("Valid", "layers: ")


def test_an_expression_that_names_itself_again_and_again_takes_bounded_work() -> None:
    looked = 0

    class Both(list):  # type: ignore[type-arg]
        """An expression that has itself twice in each of its parts."""

        def get_object(self) -> "Both":
            nonlocal looked
            looked += 1
            return self

    both = Both(["/And"])
    for _ in range(60):
        both = Both(["/And", both, both])

    class Member(dict):  # type: ignore[type-arg]
        def get_object(self) -> "Member":
            return self

    layers = Layers({})
    layers.exist = True
    assert not layers.hiding(Member({"/Type": "/OCMD", "/VE": both}))
    assert 60 < looked <= MOST_CONDITIONS
