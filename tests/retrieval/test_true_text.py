# ruff: noqa: E501 - inputs and what is expected of them, a case a line
"""What a reader sees in a file is what the model gets: numbers, marks, formats, names of columns,
order. What is left out is told.
"""

import datetime
import io
import json
from collections.abc import Callable
from typing import Any
from zipfile import ZipFile

import pytest

from ragkv.errors import DocumentError

from . import sample_files
from .pdf_files import pdf_of, text_at
from .read_files import lost, read, run, text
from .word_lists import item, level, word_with_lists

RAISED = '<w:vertAlign w:val="superscript"/>'


# Exponents and marks of notes


@pytest.mark.parametrize(
    ("markup", "expected"),
    [
        ("a mass of 3<sup>12</sup> kg", "a mass of 3^12 kg"),
        ("10<sup>-9</sup> m and (a+b)<sup>n+1</sup>", "10^-9 m and (a+b)^(n+1)"),
        ("the 2<sup>nd</sup> of CO<sub>2</sub> in 110<sub>2</sub>", "the 2nd of CO2 in 110_2"),
        ("in 1820<sup>4</sup> it", "in 1820^4 it"),
        ("in 1820<sup><a href='#n4'>4</a></sup> it<p id=n4>Annals <a href='#r4'>\u21a9</a></p>",
         "in 1820[^4] it\n\n[^4]: Annals"),
        ("rope<a href='b.xhtml#n' epub:type='noteref'>*</a> of 1820", "rope[^*] of 1820"),
        ("see <a href='#s'>the 10<sup>3</sup></a>", "see the 10^3"),
        ("<math><msup><mi>e</mi><mi>x</mi></msup><mo>=</mo><mfrac><mn>1</mn><mrow><mi>a</mi>"
         "<mo>+</mo><mn>2</mn></mrow></mfrac></math> holds", "e^x=1/(a+2) holds"),
    ],
)  # fmt: skip
def test_raised_text_never_becomes_digits_of_the_number_before_it(
    markup: str, expected: str
) -> None:
    assert text("a.html", markup) == expected
    if "epub" not in markup:
        container = '<c xmlns="u"><rootfile full-path="b.opf"/></c>'
        book = '<p><manifest><item id="a" href="a.x"/></manifest><spine><itemref idref="a"/></spine></p>'
        files = {"META-INF/container.xml": container, "b.opf": book, "a.x": markup}
        assert text("a.epub", sample_files.zipped(files)) == expected


def test_raised_text_of_a_word_file_and_its_notes_are_told_apart() -> None:
    formula = (
        "<m:oMath><m:sSup><m:e><m:r><m:t>v</m:t></m:r></m:e><m:sup><m:r><m:t>2</m:t></m:r></m:sup>"
        "</m:sSup></m:oMath>"
    )
    body = f"<w:p>{run('7')}{run('15', RAISED)}{run(' bolts, ')}{formula}</w:p>"
    assert text("a.docx", word_with_lists(body, [])) == "7^15 bolts, v^2"


def test_raised_text_of_a_slide_and_its_numbered_items_have_their_marks() -> None:
    import pptx
    from lxml import etree

    show = pptx.Presentation()
    frame = show.slides.add_slide(show.slide_layouts[1]).placeholders[1].text_frame
    frame.text = "4"
    raised = frame.paragraphs[0].add_run()
    raised.text = "20"
    raised.font._element.set("baseline", "30000")
    for words in ("first", "second"):
        added = frame.add_paragraph()
        added.text = words
        space = "{http://schemas.openxmlformats.org/drawingml/2006/main}"
        number = etree.SubElement(added._p.get_or_add_pPr(), f"{space}buAutoNum")
        number.set("type", "romanUcPeriod")
        number.set("startAt", "4")
    assert text("a.pptx", saved(show)) == "4^20\nIV. first\nV. second"


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        (("3", "7^5:12", " bolts"), "3^12 bolts"),
        (("in 1820", "6.5^4:3", " it"), "in 1820^3 it"),
        (("CO", "7^-3:2", " and 110", "7^-3:2", " bits"), "CO2 and 110_2 bits"),
        (("the 2", "7^5:nd", " wheel"), "the 2nd wheel"),
        (("7^5:3", "Annals of Marl"), "3 Annals of Marl"),
    ],
)
def test_raised_text_of_a_pdf_has_its_mark(shown: tuple[str, ...], expected: str) -> None:
    assert text("a.pdf", pdf_of(text_at(700, *shown))) == expected


# Numbers of lists and clauses


@pytest.mark.parametrize(
    ("markup", "expected"),
    [
        ("<ol start=12><li>a<li>b</ol>", "12. a\n13. b"),
        ("<ol><li>a<li value=7>b<li>c</ol>", "1. a\n7. b\n8. c"),
        ("<ol type=i start=9><li>a<li>b</ol>", "ix. a\nx. b"),
        ("<ol style='list-style-type:upper-alpha' start=26><li>a<li>b</ol>", "Z. a\nAA. b"),
        ("<ol reversed start=2><li>a<li>b</ol>", "2. a\n1. b"),
        ("<ol reversed><li>a<li>b</ol>", "- a\n- b"),
    ],
)
def test_items_of_a_list_have_the_numbers_that_a_browser_shows(markup: str, expected: str) -> None:
    assert text("a.html", markup) == expected


LEVELS = [
    level(0, "decimal", "%1."),
    level(1, "decimal", "%1.%2"),
    level(2, "lowerLetter", "(%3)"),
    level(3, "lowerRoman", "(%4)"),
]


@pytest.mark.parametrize(
    ("body", "levels", "starts", "expected"),
    [
        (item("One", 0) + item("Two", 0) + item("Scope", 1) + item("Persons", 1), LEVELS, "",
         "1. One\n2. Two\n  2.1 Scope\n  2.2 Persons"),
        (item("a", 2) + "<w:p/>" + item("see (a)") + item("b", 2), LEVELS, "",
         "(a) a\n\nsee (a)\n\n    (b) b"),
        (item("a", 2) + item("x", 3) + item("y", 3) + item("b", 2) + item("x", 3), LEVELS, "",
         "(a) a\n      (i) x\n      (ii) y\n    (b) b\n      (i) x"),
        (item("a", 0) + item("b", 0, 2), LEVELS, "", "1. a\n2. b"),
        (item("a", 0) + item("b", 0, 2) + item("c", 0, 2), LEVELS,
         '<w:lvlOverride w:ilvl="0"><w:startOverride w:val="9"/></w:lvlOverride>',
         "1. a\n9. b\n10. c"),
        (item("a", 0) + item("b", 1),
         [level(0, "upperRoman", "Article %1", 4), level(1, "decimal", "%1.%2", 1, "<w:isLgl/>")],
         "", "Article IV a\n  4.1 b"),
        (item("Terms", 0, style="Heading1") + item("Fees", 1, style="Heading2"), LEVELS, "",
         "# 1. Terms\n\n## 1.1 Fees"),
        (item("dot", 0) + item("in", 1), [level(0, "bullet", "\u00b7"), level(1, "bullet", "o")],
         "", "- dot\n  - in"),
    ],
)  # fmt: skip
def test_paragraphs_of_a_word_file_have_the_numbers_that_word_shows(
    body: str, levels: list[str], starts: str, expected: str
) -> None:
    assert text("a.docx", word_with_lists(body, levels, starts)) == expected


def test_a_style_can_number_paragraphs_and_make_them_headings() -> None:
    styles = (
        '<w:style w:type="paragraph" w:styleId="Clause"><w:name w:val="Clause"/><w:pPr><w:numPr>'
        '<w:ilvl w:val="1"/><w:numId w:val="1"/></w:numPr></w:pPr></w:style>'
        '<w:style w:type="paragraph" w:styleId="Part"><w:name w:val="Part"/><w:pPr><w:numPr>'
        '<w:numId w:val="1"/></w:numPr><w:outlineLvl w:val="1"/></w:pPr></w:style>'
    )
    body = (
        item("Rent", style="Part") + item("is due.", style="Clause") + item("No.", style="Clause")
    )
    made = word_with_lists(body, LEVELS, styles=styles)
    assert text("a.docx", made) == "## 1. Rent\n\n  1.1 is due.\n  1.2 No."


# Sheets


def saved(made: Any) -> bytes:
    out = io.BytesIO()
    made.save(out)
    return out.getvalue()


def sheet(
    *rows: tuple[object, ...], change: Callable[[Any, Any], object] = lambda *_: None
) -> bytes:
    import openpyxl

    book = openpyxl.Workbook()
    for row in rows:
        book.active.append(row)
    change(book, book.active)
    return saved(book)


@pytest.mark.parametrize(
    ("value", "code", "expected"),
    [
        (0.125, "0.0%", "12.5%"),
        (1250.5, '#,##0.00 "EUR"', "1250.50 EUR"),
        (-3, "[$$-409]#,##0.00;[Red]([$$-409]#,##0.00)", "($3.00)"),
        (815, "00000", "00815"),
        (4155550123, "(000) 000-0000", "(415) 555-0123"),
        (datetime.datetime(1901, 3, 7), "d/m/yy", "1901-03-07"),
        (datetime.datetime(2001, 3, 7, 6, 5), "dd.mm.yyyy hh:mm", "2001-03-07 06:05"),
        (datetime.timedelta(hours=27, minutes=5), "[h]:mm", "27:05"),
        (2_500_000, '0.0,,"M"', "2.5M"),
        (12345, "0.0E+00", "1.2E+04"),
        (0.1 + 0.2, "General", "0.3"),
        (0, '0;-0;"none"', "none"),
        (True, "General", "TRUE"),
        (7, "[<5]0;0.00", "7"),
    ],
)
def test_a_cell_has_the_text_that_a_spreadsheet_shows(
    value: object, code: str, expected: str
) -> None:
    data = sheet(
        ("name", "value"), ("x", value), change=lambda _, s: setattr(s["B2"], "number_format", code)
    )
    assert text("a.xlsx", data) == f"# Sheet\n\nname: x; value: {expected}"


def test_a_formula_without_a_stored_value_is_kept_and_told() -> None:
    document = read("a.xlsx", sheet(("a", "twice"), (1, "=A2*2"), (3, "=A3*2")))
    assert document.text == "# Sheet\n\na: 1; twice: =A2*2\na: 3; twice: =A3*2"
    assert "the values of 2 formulas" in lost(document)


def test_a_formula_whose_stored_value_is_empty_has_that_value() -> None:
    name = "xl/worksheets/sheet1.xml"
    changed = io.BytesIO()
    with (
        ZipFile(io.BytesIO(sheet(("a", "late"), (1, '=IF(A2=1,"","late")')))) as given,
        ZipFile(changed, "w") as archive,
    ):
        for entry in given.namelist():
            data = given.read(entry)
            if entry == name:
                assert b'<c r="B2">' in data
                data = data.replace(b'<c r="B2">', b'<c r="B2" t="str">')
            archive.writestr(entry, data)
    document = read("a.xlsx", changed.getvalue())
    assert (document.text, lost(document)) == ("# Sheet\n\na: 1", "")


def test_hidden_sheets_rows_and_columns_are_left_out_and_told_but_filtered_rows_are_read() -> None:
    def hide(book: Any, one: Any) -> None:
        one.row_dimensions[3].hidden = True
        one.column_dimensions["B"].hidden = True
        book.create_sheet("Salaries").sheet_state = "hidden"

    rows = (("a", "b", "c"), (1, 2, 3), (4, 5, 6), (7, 8, 9))
    document = read("a.xlsx", sheet(*rows, change=hide))
    assert document.text == "# Sheet\n\na: 1; c: 3\na: 7; c: 9"
    assert lost(document) == (
        "sheet Sheet: 1 hidden row; sheet Sheet: 1 hidden column; sheet Salaries, which is hidden"
    )

    def filtered(_: Any, one: Any) -> None:
        one.auto_filter.ref = "A1:C4"
        one.auto_filter.add_filter_column(0, ["1"])
        one.row_dimensions[3].hidden = True

    document = read("a.xlsx", sheet(*rows, change=filtered))
    assert ("a: 4; b: 5; c: 6" in document.text, lost(document)) == (True, "")


# Names of columns


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ("Yield of the mills\n\nmill,rope,paper\nMarl,3,4\nKell,5,6\n",
         "Yield of the mills\nmill: Marl; rope: 3; paper: 4\nmill: Kell; rope: 5; paper: 6"),
        ("# from the annals, 1901\nmill;rope\nMarl;3\n", "from the annals, 1901\nmill: Marl; rope: 3"),
        ("mill,1901,,1902,\n,rope,paper,rope,paper\nMarl,1,2,3,4\n",
         "mill: Marl; 1901 / rope: 1; 1901 / paper: 2; 1902 / rope: 3; 1902 / paper: 4"),
        ("Author:,Ada\nDate:,1901\nmill,rope,paper,sum\nMarl,3,4,7\n",
         "Author:; Ada\nDate:; 1901\nmill: Marl; rope: 3; paper: 4; sum: 7"),
        ("mill,1901,1902\nMarl,1,2\n", "mill: Marl; 1901: 1; 1902: 2"),
        ("#id,mill\n1,Marl\n", "#id: 1; mill: Marl"),
        ("mill,,town\nA,b,C\nD,e,F\n", "mill: A; b; town: C\nmill: D; e; town: F"),
    ],
)  # fmt: skip
def test_the_names_of_columns_are_found_below_titles_and_in_two_rows(
    rows: str, expected: str
) -> None:
    assert text("a.csv", rows) == expected


def test_a_name_in_merged_cells_stands_in_all_of_their_columns_and_rows() -> None:
    def merge(_: Any, one: Any) -> None:
        for cells in ("A1:E1", "A2:A3", "B2:C2", "D2:E2", "A4:A5"):
            one.merge_cells(cells)

    rows = (
        ("Yield",),
        ("mill", "rope", None, "paper", None),
        (None, 1901, 1902, 1901, 1902),
        ("Marl", 1, 2, 3, 4),
        (None, 5, 6, 7, 8),
    )
    assert text("a.xlsx", sheet(*rows, change=merge)) == (
        "# Sheet\n\nYield\n"
        "mill: Marl; rope / 1901: 1; rope / 1902: 2; paper / 1901: 3; paper / 1902: 4\n"
        "mill: Marl; rope / 1901: 5; rope / 1902: 6; paper / 1901: 7; paper / 1902: 8"
    )


NAMES = ["mill", "wheels", "built"]
ROWS = [[f"Mill {n}", f"{n}", f"{1800 + n}"] for n in range(60)]


def long_html() -> bytes:
    rows = "".join(f"<tr>{''.join(f'<td>{one}' for one in row)}" for row in ROWS)
    return f"<table><tr>{''.join(f'<th>{one}' for one in NAMES)}{rows}</table>".encode()


def long_slide() -> bytes:
    import pptx

    show = pptx.Presentation()
    shapes = show.slides.add_slide(show.slide_layouts[6]).shapes
    table = shapes.add_table(61, 3, 0, 0, 100, 100).table
    for at, row in enumerate([NAMES, *ROWS]):
        for column, value in enumerate(row):
            table.cell(at, column).text = value
    return saved(show)


LONG: dict[str, Callable[[], bytes]] = {
    "a.md": lambda: "\n".join(
        ["| mill | wheels | built |", "|---|--:|:-:|", *(f"| {' | '.join(row)} |" for row in ROWS)]
    ).encode(),
    "a.html": long_html,
    "b.html": lambda: long_html().replace(b"<th>", b"<td>"),
    "a.docx": lambda: sample_files.word(sample_files.table(NAMES, *ROWS)),
    "a.pptx": long_slide,
    "a.xlsx": lambda: sheet(tuple(NAMES), *map(tuple, ROWS)),
    "a.csv": lambda: "\n".join(map(",".join, [NAMES, *ROWS])).encode(),
}


@pytest.mark.parametrize("name", LONG)
def test_each_row_of_a_long_table_names_its_columns_in_every_format(name: str) -> None:
    lines = text(name, LONG[name]()).split("\n")
    assert "mill: Mill 41; wheels: 41; built: 1841" in lines
    assert "mill: Mill 59; wheels: 59; built: 1859" in lines


@pytest.mark.parametrize("name", ["a.csv", "a.xlsx", "a.html"])
def test_each_part_of_a_wide_row_says_which_row_it_is_of(name: str) -> None:
    names = ["mill", *(f"year {n}" for n in range(80))]
    rows = [[mill, *(f"{n} bales" for n in range(80))] for mill in ("Marl", "Kell")]
    made: bytes = {
        "a.csv": lambda: "\n".join(map(",".join, [names, *rows])).encode(),
        "a.xlsx": lambda: sheet(tuple(names), *map(tuple, rows)),
        "a.html": lambda: (
            f"<table><tr><th>{'<th>'.join(names)}"
            + "".join(f"<tr><td>{'<td>'.join(row)}" for row in rows)
            + "</table>"
        ).encode(),
    }[name]()
    lines = [line for line in text(name, made).split("\n") if "year" in line]
    assert len(lines) > 6 and all(len(line) < 500 for line in lines)
    assert all(line.startswith(("mill: Marl; ", "mill: Kell; ")) for line in lines)


def test_pairs_of_a_name_and_a_value_and_small_tables_keep_their_form() -> None:
    pairs = "<table><tr><td>Name<td>Ada<tr><td>Born<td>1790</table>"
    assert text("a.html", pairs) == "Name\tAda\nBorn\t1790"
    assert text("a.html", pairs.replace("<tr><td>", "<tr><th>")) == "Name\tAda\nBorn\t1790"
    assert text("a.md", "|a|b|\n|-|-|\n|1|2|\n") == "|a|b|\n|-|-|\n|1|2|\n"
    assert "|---|" in text("b.md", "```\n|a|b|\n|---|---|\n" + "|1|2|\n" * 9 + "```\n")


# Escapes and declared encodings


@pytest.mark.parametrize(
    ("name", "data", "expected"),
    [
        ("a.json", json.dumps({"t": "K\u00e4fer \U0001f41e"}), '{"t": "K\u00e4fer \U0001f41e"}'),
        ("a.json", '{"t": "C:\\\\u00e4 \\u000a \\ud800"}', '{"t": "C:\\\\u00e4 \\u000a \\ud800"}'),
        ("a.md", "K&auml;fer &#252;ber &amp; &lt;b&gt; &nope;", "K\u00e4fer \u00fcber &amp; &lt;b&gt; &nope;"),
        ("a.xml", b'<?xml version="1.0" encoding="windows-1251"?><a>\xe4\xe0</a>',
         '<?xml version="1.0" encoding="windows-1251"?><a>\u0434\u0430</a>'),
        ("a.py", b"#!/bin/python\n# -*- coding: latin-1-unix -*-\nx = '\xe4'\n",
         "#!/bin/python\n# -*- coding: latin-1-unix -*-\nx = '\u00e4'\n"),
        ("a.tex", b"\\usepackage[latin1]{inputenc}\n\xe4", "\\usepackage[latin1]{inputenc}\n\u00e4"),
        ("a.log", "\x1b[1;31mFAIL\x1b[0m \x1b]8;;http://x\x1b\\link N\x08NO\x08O", "FAIL link NO"),
        ("a.txt", "The mu\u00adni\u00ad\ncipal mill", "The municipal mill"),
    ],
)  # fmt: skip
def test_what_is_written_in_another_way_is_read_as_what_it_means(
    name: str, data: bytes | str, expected: str
) -> None:
    assert text(name, data) == expected


# Order and layers


def test_the_title_of_a_slide_comes_first_and_a_hidden_slide_is_told() -> None:
    import pptx

    show = pptx.Presentation()
    slide = show.slides.add_slide(show.slide_layouts[1])
    slide.placeholders[1].text = "It makes rope."
    slide.shapes.title.text = "The mill"
    title = slide.shapes.title._element
    title.getparent().append(title)
    hidden = show.slides.add_slide(show.slide_layouts[5])
    hidden.shapes.title.text = "Draft"
    hidden._element.set("show", "0")
    document = read("a.pptx", saved(show))
    assert document.text == "The mill\n\nIt makes rope."
    assert lost(document) == "slide 2, which is hidden"


LAYER = "<< /Type /OCG /Name (Draft) >>"
OFF = "/OCProperties << /OCGs [100 0 R] /D << /OFF [100 0 R] >> >>"
ON = "/OCProperties << /OCGs [100 0 R] /D << /Order [100 0 R] >> >>"
LAYERED = f"{text_at(700, 'Valid')} /OC /L1 BDC {text_at(680, 'Not yet')} EMC"

# Glyphs of several letters, two of which are equal and stand at one place.
GLYPHS = "(o) Tj /Span << /ActualText (ff) >> BDC (#) Tj EMC (er ) Tj /Span << /ActualText (1100) >> BDC (#) Tj EMC"


@pytest.mark.parametrize(
    ("data", "expected", "told"),
    [
        (pdf_of(" ".join([text_at(700, "The mill"), text_at(700, "The mill", x=72.3)])), "The mill", ""),
        (pdf_of(" ".join(text_at(700 - 12 * n, f"Line {n}") for n in range(9)) + " " + " ".join(
            text_at(700 - 12 * n, f"Line {n}") for n in range(9))), "\n".join(f"Line {n}" for n in range(9)), ""),
        (pdf_of(LAYERED, objects=[LAYER], catalog=OFF), "Valid", "layers that are off: Draft"),
        (pdf_of(LAYERED, objects=[LAYER], catalog=ON), "Valid\nNot yet", ""),
        (pdf_of("BT 72 700 Td /F1 12 Tf /Span << /ActualText (file) >> BDC (\\001le) Tj EMC ET"), "file", ""),
        (pdf_of(f"BT 72 700 Td /F1 12 Tf {GLYPHS} ET"), "offer 1100", ""),
        (pdf_of(f"BT 72 700 Td /F1 12 Tf {GLYPHS} ET BT 72 700 Td /F1 12 Tf {GLYPHS} ET"), "offer 1100", ""),
        (pdf_of("BT 72 700 Td /F1 .1 Tf (aaa 1100) Tj ET"), "aaa 1100", ""),
        (pdf_of("BT 72 700 Td /F1 12 Tf (The muni-) Tj 0 -14 Td (cipal mill) Tj ET"), "The municipal mill", ""),
        (pdf_of("BT 72 700 Td /F1 12 Tf (A two-part and two-) Tj 0 -14 Td (part one) Tj ET"), "A two-part and two-part one", ""),
        (pdf_of(text_at(700, "Page"), objects=["<< /Type /Annot /Subtype /FreeText /Rect [0 0 9 9] /Contents (Typed) >>",
                                               "<< /Type /Annot /Subtype /Text /Rect [0 0 9 9] /Contents (Why?) >>"],
                page="/Annots [100 0 R 101 0 R]"), "Page\n\nTyped", "1 comment"),
    ],
)  # fmt: skip
def test_a_pdf_is_read_as_it_is_shown(data: bytes, expected: str, told: str) -> None:
    document = read("a.pdf", data)
    assert (document.text, lost(document)) == (expected, told)


@pytest.mark.parametrize(
    ("body", "expected", "told"),
    [
        (f"<w:p>{run('Rent')}{run(' 900', '<w:vanish/>')}</w:p>", "Rent", "1 hidden text"),
        (f"<w:p>{run('Rent')}{run(' 900', '<w:vanish w:val=&quot;0&quot;/>')}</w:p>", "Rent 900", ""),
        (f"<w:p>{run('one')}<w:r><w:br w:type='page'/></w:r>{run('two')}</w:p>", "one\ntwo", ""),
        (f"<w:p>{run('see ')}<w:fldSimple w:instr='REF'>{run('2.2')}</w:fldSimple></w:p>", "see 2.2", ""),
        ("<w:p><w:r><w:ruby><w:rt>" + run("kana") + "</w:rt><w:rubyBase>" + run("base")
         + "</w:rubyBase></w:ruby></w:r></w:p>", "base(kana)", ""),
    ],
)  # fmt: skip
def test_a_word_file_is_read_as_it_is_shown(body: str, expected: str, told: str) -> None:
    document = read("a.docx", sample_files.word(body.replace("&quot;", '"')))
    assert (document.text, lost(document)) == (expected, told)


@pytest.mark.parametrize(
    ("markup", "expected"),
    [
        ("<x-card><template shadowrootmode=open><p>shown</p></template></x-card>", "shown"),
        ("<template><p>not shown</p></template>yes", "yes"),
        (
            "<span class='katex'><math><mi>E</mi></math><span class='katex-html'>E</span></span>",
            "E",
        ),
    ],
)
def test_a_page_is_read_as_it_is_shown(markup: str, expected: str) -> None:
    assert text("a.html", markup) == expected


# Names of formats


NOTEBOOK = {
    "cells": [
        {"cell_type": "markdown", "source": ["# Wheel\n", "of oak"]},
        {
            "cell_type": "code",
            "source": "1 + 1",
            "outputs": [
                {"output_type": "execute_result", "data": {"text/plain": ["2"]}},
                {"output_type": "display_data", "data": {"image/png": "x"}},
            ],
        },
    ],
    "metadata": {"kernelspec": {"language": "R"}},
}


@pytest.mark.parametrize(
    ("name", "data", "expected"),
    [
        ("a.ipynb", json.dumps(NOTEBOOK), "# Wheel\nof oak\n\n```R\n1 + 1\n```\n\n```\n2\n```"),
        ("a.srt", "1\n00:00:01,000 --> 00:00:02,000\n<b>The mill</b>\nof Marl\n\n2\n0:00:03,0 --> 0:00:04,0\nruns.\n",
         "The mill of Marl\nruns."),
        ("a.vtt", "WEBVTT\n\nNOTE no\n\n00:01.000 --> 00:02.000\n<v Ada>Yes &amp; no\n\n00:02.000 --> 00:03.000\n"
                  "<v Ada>Yes &amp; no\nmore\n", "Ada: Yes & no\nmore"),
        ("a.mdx", "# A\n", "# A\n"),
        ("a.Rmd", "# A\n", "# A\n"),
        ("a.qmd", "# A\n", "# A\n"),
        ("a.ndjson", '{"text": "one"}\n', "one"),
        ("a.xlsm", sheet(("a", "b"), (1, 2)), "# Sheet\n\na: 1; b: 2"),
        ("notes", "Plain.", "Plain."),
        ("minutes 7.3.1901", "Plain.", "Plain."),
        ("mail.1", "Received: by x\nFrom: a@b\nSubject: Wheel\n\nOf oak.", "Subject: Wheel\nFrom: a@b\n\nOf oak."),
        ("plan", sample_files.docx(), sample_files.docx),
    ],
)  # fmt: skip
def test_formats_are_read_under_all_their_names_and_without_one(
    name: str, data: bytes | str, expected: Any
) -> None:
    assert text(name, data) == (text("a.docx", expected()) if callable(expected) else expected)


@pytest.mark.parametrize(
    ("name", "data"), [("a.ipynb", "{}"), ("a.srt", "no times"), ("x", b"\x7fE\0")]
)
def test_what_only_has_the_name_of_a_format_is_refused(name: str, data: bytes | str) -> None:
    with pytest.raises(DocumentError):
        text(name, data)
