# ruff: noqa: E501 - inputs and what is expected of them, a case a line
"""Text that is hidden is left out and told; text that was taken back or has a reading beside it
says so.
"""

import io

import pytest

from .read_files import book, lost, read, run, styled_word, text


@pytest.mark.parametrize(
    ("markup", "expected", "told"),
    [
        ("<p>Marl<p hidden>Kell", "Marl", "1 hidden text"),
        ("<p>Marl<div style='color:red; DISPLAY : none'>Kell <b>and</b> Tarn</div>", "Marl", "1 hidden text"),
        ("<p>Marl<span style='visibility:hidden'>Kell</span> and <i style='visibility:collapse'>Tarn</i>", "Marl and", "2 hidden texts"),
        ("<p>Marl<p hidden='until-found'>Kell", "Marl\n\nKell", ""),
        ("<p>Marl<img hidden><div hidden> </div><p style='display:block'>Kell", "Marl\n\nKell", ""),
        ("<dialog>Sign in</dialog><dialog open>Kell</dialog>", "Kell", ""),
        ("<style>.tab{display:none}</style><p class=tab>Marl", "Marl", ""),
        ("<ul><li>Marl<li hidden>Kell<li>Tarn</ul>", "- Marl\n- Tarn", "1 hidden text"),
        ("<table><tr><th>mill<th>bales<tr hidden><td>Kell<td>4<tr><td>Marl<td>3</table>", "mill: Marl; bales: 3", "1 hidden text"),
        # a formula that is shown as a picture, and pages that a script shows
        ("so <span style='display:none'><math><msup><mi>u</mi><mn>2</mn></msup></math></span><img>", "so u^2", ""),
        ("so <span hidden>x <math><mi>u</mi></math></span>it", "so it", "1 hidden text"),
        ("<body style='visibility:hidden'><p>Marl", "Marl", ""),
        ("<div style='display:none'><p>Marl</div><p hidden>Kell", "Marl\n\nKell", ""),
        ("Marl<template><p>Kell</template><video>no video</video><datalist><option>Tarn</datalist>", "Marl", ""),
    ],
)  # fmt: skip
def test_what_a_page_hides_is_left_out_and_told(markup: str, expected: str, told: str) -> None:
    document = read("a.html", markup)
    assert (document.text, lost(document)) == (expected, told)


def test_notes_that_a_book_shows_on_a_click_are_read() -> None:
    chapter = (
        "<p>In 1820<a epub:type='noteref' href='#n'>3</a> it<div hidden>draft</div>"
        "<aside epub:type='footnote' id='n' hidden>Annals</aside>"
    )
    document = read("a.epub", book(chapter))
    assert document.text == "In 1820[^3] it\n\n[^3]: Annals"
    assert lost(document) == "1 hidden text"


@pytest.mark.parametrize(
    ("markup", "expected"),
    [
        ("rent <del>900</del><ins>950</ins> now", "rent ~~900~~ 950 now"),
        ("<s>7 bales</s> 8 bales", "~~7 bales~~ 8 bales"),
        ("10<del>0</del> and <strike> old </strike>new", "10~~0~~ and ~~old~~ new"),
        ("<pre>a\n  <del>b  c</del>\n</pre>", "```\na\n  b  c\n```"),
        ("<del></del>Marl", "Marl"),
        ("<ruby>磨<rt>ま</rt>坊<rt>ぼう</rt></ruby>の", "磨坊(まぼう)の"),
        ("<ruby>坊<rp>(</rp><rt>bō</rt><rp>)</rp></ruby>", "坊(bō)"),
        ("<ruby>Marl</ruby> <ruby><rt>x</rt></ruby>", "Marl x"),
        ("<q>Of oak</q>, he said", '"Of oak", he said'),
    ],
)
def test_text_that_is_struck_out_quoted_or_has_a_reading_says_so(
    markup: str, expected: str
) -> None:
    assert text("a.html", f"<div>{markup}</div>") == expected


def style(name: str, kind: str, more: str = "<w:rPr><w:vanish/></w:rPr>") -> str:
    return f'<w:style w:type="{kind}" w:styleId="{name}"><w:name w:val="{name}"/>{more}</w:style>'


STYLES = (
    style("Secret", "paragraph")
    + style("More", "paragraph", '<w:basedOn w:val="Secret"/>')
    + style("Open", "paragraph", '<w:basedOn w:val="Secret"/><w:rPr><w:vanish w:val="0"/></w:rPr>')
    + style("Inner", "character")
)


@pytest.mark.parametrize(
    ("paragraph_style", "properties", "is_shown"),
    [
        ("Secret", "", False),
        ("More", "", False),
        ("Open", "", True),
        ("", '<w:rStyle w:val="Inner"/>', False),
        # two styles that hide cancel each other out, the run's own word counts most
        ("Secret", '<w:rStyle w:val="Inner"/>', True),
        ("Secret", '<w:vanish w:val="false"/>', True),
        ("Open", "<w:vanish/>", False),
    ],
)
def test_a_word_file_may_hide_text_by_the_style_of_a_paragraph_or_a_run(
    paragraph_style: str, properties: str, is_shown: bool
) -> None:
    named = f'<w:pPr><w:pStyle w:val="{paragraph_style}"/></w:pPr>' if paragraph_style else ""
    body = f"<w:p>{run('Rent')}</w:p><w:p>{named}{run('900', properties)}</w:p>"
    document = read("a.docx", styled_word(body, STYLES))
    assert document.text == ("Rent\n\n900" if is_shown else "Rent")
    assert lost(document) == ("" if is_shown else "1 hidden text")


def test_a_word_file_leaves_out_what_was_deleted_and_marks_what_is_struck_out() -> None:
    deleted = "<w:del><w:r><w:delText>850</w:delText></w:r></w:del>"
    body = f"<w:p>{run('Rent ')}{deleted}{run('900', '<w:strike/>')}{run(' 950')}</w:p>"
    assert text("a.docx", styled_word(body, "")) == "Rent ~~900~~ 950"


def test_a_slide_leaves_out_hidden_shapes_and_marks_what_is_struck_out() -> None:
    import pptx

    show = pptx.Presentation()
    slide = show.slides.add_slide(show.slide_layouts[6])
    for words in ("Rent", "Draft"):
        box = slide.shapes.add_textbox(0, 0, 100, 100)
        box.text_frame.text = words
    box._element._nvXxPr.cNvPr.set("hidden", "1")
    struck = slide.shapes[0].text_frame.paragraphs[0].add_run()
    struck.text = " 900"
    struck.font._element.set("strike", "sngStrike")
    out = io.BytesIO()
    show.save(out)
    document = read("a.pptx", out.getvalue())
    assert (document.text, lost(document)) == ("Rent ~~900~~", "slide 1: 1 hidden text")
