"""Raised and lowered text never becomes a part of the number beside it, however a format says that
it is raised.
"""

import pytest

from ragkv.retrieval.documents.html.looks import Sheets, look_of
from ragkv.retrieval.documents.marks import Place, joined

from .pdf_files import pdf_of, text_at
from .read_files import book, run, styled_word, text
from .sample_files import paragraph, word

# One rule for all formats


def parts(pattern: str) -> list[tuple[str, Place]]:
    """Parts from a text such as "x^{2}_{1}", where "^{" raises and "_{" lowers."""
    found: list[tuple[str, Place]] = []
    for piece in pattern.replace("^{", "\1^").replace("_{", "\1_").split("\1"):
        mark = {"^": Place.RAISED, "_": Place.LOWERED}.get(piece[:1])
        if mark is not None:
            script, _, piece = piece[1:].partition("}")
            found.append((script, mark))
        found.append((piece, Place.LINE))
    return found


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        # a number stays behind a capital and a bracket, as people write it
        ("H_{2}O, Mg_{3}(PO_{4})_{2}, K_{2}5", "H2O, Mg3(PO4)2, K_2 5"),
        ("B_{6}, PM_{2.5}, T_{4}", "B6, PM2.5, T4"),
        ("lg_{3}9 and x_{0}1 in 120_{3}", "lg_3 9 and x_0 1 in 120_3"),
        ("b_{n}, v_{min}, y_{k}z_{k}", "b_n, v_min, y_k z_k"),
        ("PO_{4}^{3-} and x_{1}^{2}", "PO4^(3-) and x_1^2"),
        # what follows a script is not read as a part of it
        ("3^{4}5, e^{t}dt, 10^{9}Hz", "3^4 5, e^t dt, 10^9Hz"),
        ("x^{(a)+(b)}, x^{(a+b)}", "x^((a)+(b)), x^(a+b)"),
        ("7^{th}, 1^{er}, M^{lle}, x^{e}", "7th, 1er, Mlle, x^e"),
        ("K^{+}, rope^{[4]}, 1820^{4}", "K+, rope[4], 1820^4"),
        ("1820^{12} it", "1820^12 it"),
        ("5^{ 8 }bales", "5 ^8 bales"),
        # a line that stands higher as a whole stands above nothing
        ("^{Set in small letters.}\nThe mill", "Set in small letters.\nThe mill"),
        ("Marl\n_{a caption}", "Marl\na caption"),
    ],
)
def test_scripts_have_marks_where_they_would_be_read_as_something_else(
    pattern: str, expected: str
) -> None:
    assert joined(parts(pattern)) == expected


def test_parts_of_one_script_are_one_script() -> None:
    raised = [("4", Place.LINE), ("n", Place.RAISED), ("+", Place.RAISED), ("1", Place.RAISED)]
    assert joined(raised) == "4^(n+1)"


# By style


@pytest.mark.parametrize(
    ("style", "place"),
    [
        ("vertical-align: super", Place.RAISED),
        ("font-size: 70%; VERTICAL-ALIGN:Sub !important", Place.LOWERED),
        ("vertical-align: .4em", Place.RAISED),
        ("vertical-align:-30%", Place.LOWERED),
        ("position: relative; top: -4.5pt", Place.RAISED),
        ("position:relative;bottom:-0.3em", Place.LOWERED),
        ("top: -4pt", None),
        ("position: relative; top: -60px", None),
        ("vertical-align: -1px", None),
        ("vertical-align: middle", None),
        ("vertical-align", None),
        ("", None),
    ],
)
def test_a_style_says_where_text_stands(style: str, place: Place | None) -> None:
    assert look_of({"style": style}).place is place


def test_a_sheet_says_it_by_class_by_element_and_class_and_by_id() -> None:
    sheets = Sheets()
    sheets.add("/* c */ .up, p .no { vertical-align: super } span.low{vertical-align:sub}")
    sheets.add("@media print { .x { vertical-align: super } } #one { vertical-align: 50% }")
    places = [
        sheets.place(tag, {"class": name, "id": of})
        for tag, name, of in (
            ("b", "c9 up", ""),
            ("span", "low", ""),
            ("b", "low", ""),
            ("b", "no", ""),
            ("b", "x", ""),
            ("i", "", "one"),
        )
    ]
    assert places == [Place.RAISED, Place.LOWERED, None, None, None, Place.RAISED]


SHEET = ".c7{vertical-align:super;font-size:8pt}"


@pytest.mark.parametrize(
    ("markup", "expected"),
    [
        ("4<span style='vertical-align:super'>15</span> bolts", "4^15 bolts"),
        (f"<style>{SHEET}</style>in 1820<span class='c1 c7'>3</span> it", "in 1820^3 it"),
        ("110<span style='position:relative;top:3pt;font-size:7pt'>2</span>", "110_2"),
        ("<div style='vertical-align:super'>Marl</div>", "Marl"),
        ("<table><tr><td style='vertical-align:super'>a<td>b</table>", "a\tb"),
        ("7<span style='vertical-align:super'><a href='#n'>2</a></span><p id=n>Annals", "7[^2]\n\n[^2]: Annals"),
        ("in 1820<a href='#n'>2</a> it<p id=n>Annals", "in 1820[^2] it\n\n[^2]: Annals"),
        ("rope.<a href='#n' class=footnote-ref>2</a><p id=n>Annals", "rope.[^2]\n\n[^2]: Annals"),
        ("Fig.<a href='#f'>2</a>, page <a href='#p'>7</a>", "Fig.2, page 7"),
    ],
)  # fmt: skip
def test_a_page_may_raise_text_by_style_and_link_to_notes_without_raising(
    markup: str, expected: str
) -> None:
    assert text("a.html", markup) == expected


def test_a_book_may_raise_text_in_a_style_sheet_of_its_own() -> None:
    assert text("a.epub", book("<p>5<b class='c7'>11</b> reams", SHEET)) == "5^11 reams"


STYLES = (
    '<w:style w:type="character" w:styleId="Up"><w:name w:val="Up"/><w:rPr>'
    '<w:vertAlign w:val="superscript"/></w:rPr></w:style>'
    '<w:style w:type="character" w:styleId="Higher"><w:name w:val="Higher"/>'
    '<w:basedOn w:val="Up"/></w:style>'
    '<w:style w:type="character" w:styleId="Down"><w:name w:val="Down"/><w:rPr>'
    '<w:position w:val="-6"/></w:rPr></w:style>'
)


@pytest.mark.parametrize(
    ("properties", "expected"),
    [
        ('<w:rStyle w:val="Up"/>', "2^14 bolts"),
        ('<w:rStyle w:val="Higher"/>', "2^14 bolts"),
        ('<w:rStyle w:val="Down"/>', "2_14 bolts"),
        ('<w:position w:val="8"/>', "2^14 bolts"),
        ('<w:position w:val="1"/>', "214 bolts"),
        ('<w:rStyle w:val="Up"/><w:vertAlign w:val="baseline"/>', "214 bolts"),
        ('<w:vertAlign w:val="subscript"/>', "2_14 bolts"),
    ],
)
def test_a_word_file_may_raise_text_by_style_and_by_position(
    properties: str, expected: str
) -> None:
    body = f"<w:p>{run('2')}{run('1', properties)}{run('4', properties)}{run(' bolts')}</w:p>"
    assert text("a.docx", styled_word(body, STYLES)) == expected


def test_a_raised_paragraph_of_a_word_file_is_a_paragraph() -> None:
    body = paragraph("Marl") + f"<w:p>{run('a caption', '<w:position w:val=&quot;9&quot;/>')}</w:p>"
    assert text("a.docx", word(body.replace("&quot;", '"'))) == "Marl\n\na caption"


@pytest.mark.parametrize(
    ("baselines", "expected"),
    [
        ((30000, 30000), "8^(n-1) reams"),
        ((-25000, -25000), "8_(n-1) reams"),
        ((0, 0), "8n-1 reams"),
    ],
)
def test_runs_of_a_slide_make_one_script(baselines: tuple[int, int], expected: str) -> None:
    import io

    import pptx

    show = pptx.Presentation()
    frame = show.slides.add_slide(show.slide_layouts[1]).placeholders[1].text_frame
    for words, baseline in (("8", 0), ("n", baselines[0]), ("-1", baselines[1]), (" reams", 0)):
        added = frame.paragraphs[0].add_run()
        added.text = words
        if baseline:
            added.font._element.set("baseline", str(baseline))
    out = io.BytesIO()
    show.save(out)
    assert text("a.pptx", out.getvalue()) == expected


@pytest.mark.parametrize(
    ("align", "expected"),
    [("superscript", "6^18 bales"), ("subscript", "6_18 bales"), ("baseline", "618 bales")],
)
@pytest.mark.parametrize("is_shared", [True, False])
def test_a_part_of_a_cell_may_be_raised(align: str, expected: str, is_shared: bool) -> None:
    import io

    if is_shared:
        import xlsxwriter

        shared = io.BytesIO()
        with xlsxwriter.Workbook(shared) as book:
            one = book.add_worksheet()
            one.write(0, 0, "amount")
            script = {"superscript": 1, "subscript": 2, "baseline": 0}[align]
            one.write_rich_string(
                1, 0, "6", book.add_format({"font_script": script}), "18", " bales"
            )
        assert text("a.xlsx", shared.getvalue()) == f"# Sheet1\n\namount: {expected}"
        return
    import openpyxl
    from openpyxl.cell.rich_text import CellRichText, TextBlock
    from openpyxl.cell.text import InlineFont

    made = openpyxl.Workbook()
    made.active.append(["amount"])
    made.active.append([CellRichText("6", TextBlock(InlineFont(vertAlign=align), "18"), " bales")])
    out = io.BytesIO()
    made.save(out)
    assert text("a.xlsx", out.getvalue()) == f"# Sheet\n\namount: {expected}"


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        (("lg", "7^-3:2", "8"), "lg_2 8"),
        (("3", "7^5:n", "7^5:-1", " bales"), "3^(n-1) bales"),
        (("PO", "7^-3:4", "7^5:3-"), "PO4^(3-)"),
    ],
)
def test_scripts_of_a_pdf_follow_the_same_rule(shown: tuple[str, ...], expected: str) -> None:
    assert text("a.pdf", pdf_of(text_at(700, *shown))) == expected


def test_a_link_to_another_site_is_no_note() -> None:
    page = '<p>as of v1.<a href="https://example.org/rel#n">3</a> of May</p>'
    assert "v1.3 of May" in text("a.html", page)
