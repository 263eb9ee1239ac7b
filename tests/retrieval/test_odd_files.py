"""Files as people have them and as specifications do not: no text of them is lost in silence, or
wrong.
"""

import contextlib
import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from ragkv.errors import DocumentError
from ragkv.retrieval import Document, load_bytes
from ragkv.retrieval.documents.reading import LOST
from tests.timing import assert_linear, processor_seconds

from . import sample_files
from .pdf_files import pdf_of
from .sample_files import cell, paragraph, table, word


def read(name: str, data: bytes | str, encoding: str | None = None) -> Document:
    (document,) = load_bytes(Path(name), data.encode() if isinstance(data, str) else data, encoding)
    assert isinstance(document, Document), document
    return document


def text(name: str, data: bytes | str, encoding: str | None = None) -> str:
    return read(name, data, encoding).text


def lost(document: Document) -> str:
    return "; ".join(document.metadata.get(LOST, ()))


# Word

RUN = "<w:r><w:t>run</w:t></w:r>"


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (f"<w:sdt><w:sdtContent>{paragraph('in a control')}</w:sdtContent></w:sdt>", "in a control"),
        (f"<w:p><w:sdt><w:sdtContent>{RUN}</w:sdtContent></w:sdt></w:p>", "run"),
        (f"<w:p><w:ins>{RUN}</w:ins><w:del><w:r><w:delText>old</w:delText></w:r></w:del></w:p>", "run"),
        (f"<w:p><w:moveTo>{RUN}</w:moveTo></w:p>", "run"),
        (f"<w:p><w:smartTag>{RUN}</w:smartTag></w:p>", "run"),
        (table(["part", "of"], [table(["a", "b"]), "oak"]), "part\tof\na b\toak"),
        (table(["x", "y"], [f"<w:sdt><w:sdtContent>{cell('1')}</w:sdtContent></w:sdt>", "2"]), "x\ty\n1\t2"),
        (table([cell("wide", span=2), "z"], ["1", "2", "3"]), "wide\t\tz\n1\t2\t3"),
        (table([cell("tall", merge="restart"), "z"], [cell("", merge="continue"), "3"]), "tall\tz\n\t3"),
        (paragraph("one", "ListBullet") + paragraph("two", "ListBullet"), "- one\n- two"),
        (paragraph("A", "Title") + paragraph("B", "Heading2") + paragraph("c"), "# A\n\n## B\n\nc"),
    ],
)  # fmt: skip
def test_word_files_keep_controls_insertions_and_cells_in_their_columns(
    body: str, expected: str
) -> None:
    assert text("a.docx", word(body)) == expected


def test_what_a_word_file_has_besides_text_is_named() -> None:
    document = read("a.docx", word(paragraph("known") + "<w:p><w:contentPart/></w:p>"))
    assert (document.text, lost(document)) == ("known", "elements of the kind w:contentPart")


# Mail


def mail(body: bytes, charset: str = "", subject: bytes = b"Wheel") -> bytes:
    kind = b"Content-Type: text/plain" + (f'; charset="{charset}"'.encode() if charset else b"")
    return (
        b"Subject: "
        + subject
        + b"\nFrom: a@b.org\n"
        + kind
        + b"\nContent-Transfer-Encoding: 8bit\n\n"
        + body
    )


def multipart(kind: str, *parts: str) -> str:
    inner = "".join(f"--{kind}\n{part}\n" for part in parts)
    return (
        f'Subject: Wheel\nContent-Type: multipart/{kind}; boundary="{kind}"\n\n{inner}--{kind}--\n'
    )


PLAIN = "Content-Type: text/plain\n\n"
HTML = "Content-Type: text/html\n\n"
PICTURE = "Content-Type: image/png\n\nx"


@pytest.mark.parametrize(
    ("data", "body"),
    [
        (mail("caf\u00e9".encode(), "x-unknown"), "caf\u00e9"),
        (mail("caf\u00e9".encode()), "caf\u00e9"),
        (mail("caf\u00e9".encode(), "us-ascii"), "caf\u00e9"),
        (mail("\u201ccaf\u00e9\u201d".encode("cp1252"), "iso-8859-1"), "\u201ccaf\u00e9\u201d"),
        (mail("caf\u00e9".encode("latin-1"), "utf-8"), "caf\u00e9"),
        (mail("\u3042".encode("cp932"), "x-sjis"), "\u3042"),
        (b"\xef\xbb\xbf" + mail(b"plain"), "plain"),
        (mail(b"plain").decode().encode("utf-16"), "plain"),
        (multipart("alternative", f"{PLAIN} \n", f"{HTML}<p>rich</p>").encode(), "rich"),
        (multipart("alternative", f"{PLAIN}poor", f"{HTML}<p>rich</p>").encode(), "poor"),
        (multipart("mixed", f"{PLAIN}one", PICTURE, f"{PLAIN}two").encode(), "one\n\ntwo"),
        (multipart("related", f"{HTML}<h1>rich</h1>", PICTURE).encode(), "# rich"),
        (multipart("mixed", f"{PLAIN}see", "Content-Type: message/rfc822\n\nSubject: "
                                           "Inner\n\nold").encode(),
         "see\n\nSubject: Inner\n\nold"),
        (mail(b"Content"), "Content"),
    ],
)  # fmt: skip
def test_the_text_of_a_mail_is_read_whatever_its_parts_say(data: bytes, body: str) -> None:
    assert text("a.eml", data).partition("\n\n")[2] == body


@pytest.mark.parametrize(
    "subject",
    [
        "K\u00e4fer".encode(),
        b"=?utf-8?q?K=C3=A4fer?=",
        b"=?utf-8?b?S8Ok?=\n =?utf-8?q?fer?=",
        b"=?iso-8859-1?q?K=E4fer?=",
        "K\u00e4fer".encode("cp1252"),
        b"=?x-unknown?q?K=C3=A4fer?=",
    ],
)
def test_a_subject_is_read_entry_or_not(subject: bytes) -> None:
    assert read("a.eml", mail(b"x", subject=subject)).metadata["title"] == "K\u00e4fer"


def test_the_encoding_of_the_caller_is_that_of_mail_which_names_none() -> None:
    assert text("a.eml", mail("\u0414\u0430".encode("koi8-r")), "koi8-r").endswith("\u0414\u0430")
    guessed = read("a.eml", mail("\u0414\u0430".encode("koi8-r")))
    assert "read as cp1252" in lost(guessed)


# HTML


@pytest.mark.parametrize(
    ("label", "codec", "letters"),
    [
        ("iso-8859-1", "cp1252", "\u201ccaf\u00e9\u201d"),
        ("latin1", "cp1252", "\u2013"),
        ("gb2312", "gb18030", "\u9555\u3400"),
        ("x-sjis", "cp932", "\u2460\u9ad9"),
        ("windows-874", "cp874", "\u0e01\u0e02"),
        ("euc-kr", "cp949", "\ub620\ubc29"),
        ("utf-16", "utf-8", "\u00e9"),
        ("koi8-u", "koi8-u", "\u0454"),
        ("klingon", "utf-8", "\u00e9"),
        ("'windows-1251'", "cp1251", "\u0434\u0430"),
    ],
)
def test_labels_of_encodings_are_those_of_the_web(label: str, codec: str, letters: str) -> None:
    page = f"<!-- <meta charset=utf-7> --><html><head><meta charset={label}></head><p>{letters}</p>"
    assert text("a.html", page.encode(codec)) == letters


def test_an_encoding_that_is_given_overrules_a_page_and_a_mark_overrules_both() -> None:
    page = "<meta charset='utf-8'><p>\u0434\u0430</p>"
    assert text("a.html", page.encode("cp1251"), "windows-1251") == "\u0434\u0430"
    assert text("a.html", b"\xef\xbb\xbf" + page.encode(), "windows-1251") == "\u0434\u0430"
    with pytest.raises(DocumentError, match=r"is not utf-8.*--encoding"):
        text("a.html", page.encode("cp1251"))


@pytest.mark.parametrize(
    ("markup", "expected"),
    [
        ("<h1>A <b>b</b></h1>c<h3>D</h3>", "# A b\n\nc\n\n### D"),
        ("<ul><li>a<li><p>b</p><ol><li>c<li>d</ol></ul>e", "- a\n- b\n  1. c\n  2. d\n\ne"),
        ("<pre># no heading\n  x</pre>", "```\n# no heading\n  x\n```"),
        ("<table><tr><th>a<th>b<tr><td>1<td><p>2</p></table>", "a: 1; b: 2"),
        ("<table><tr><td rowspan=2>a<td>b<tr><td>c</table>", "a\tb\n\tc"),
        ("<table><tr><td><h2>Layout</h2><p>one</p><p>two</p></table>", "## Layout\n\none\n\ntwo"),
        (
            "<title>T</title><style>p "
            "{}</style><script>'<p>no'</script><noscript>on</noscript><p>a\nb</p>",
            "a b",
        ),
        ("a<br>b &amp; c&nbsp;d<hr>e", "a\nb & c d\n\ne"),
        ("<p>an <i>un</i>closed <b>tag", "an unclosed tag"),
        ("<td>cell of no table</td> end", "cell of no table end"),
        ("<svg><title>no</title><text>no</text></svg><template>no</template>yes", "yes"),
        ("<div>" * 3000 + "deep" + "</div>" * 3000 + "after", "deep after"),
    ],
)
def test_the_form_of_a_page_is_that_of_markdown(markup: str, expected: str) -> None:
    assert text("a.html", markup) == expected


# Tables


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("name;tags\nAda;a,b,c\nBo;d,e\n", "name: Ada; tags: a,b,c\nname: Bo; tags: d,e"),
        ('name,note\nAda,"a\tb"\nBo,"c\td"\n', "name: Ada; note: a b\nname: Bo; note: c d"),
        ('name, note\nAda, "a, b"\nBo, "c"\n', "name: Ada; note: a, b\nname: Bo; note: c"),
        ("sep=;\nname;born\nAda;1,5\n", "name: Ada; born: 1,5"),
        ("sep=|\nname|born\nAda|1790\n", "name: Ada; born: 1790"),
        ("a;b\n1,5;2,5\n3,5;4,5\n", "a: 1,5; b: 2,5\na: 3,5; b: 4,5"),
        (
            "id;text\n0;one, two, and 0\n1;three, four, and 1\n",
            "id: 0; text: one, two, and 0\nid: 1; text: three, four, and 1",
        ),
        (
            '"name, full"\tborn\nAda, Bo\t1\nCy, Di\t2\n',
            "name, full: Ada, Bo; born: 1\nname, full: Cy, Di; born: 2",
        ),
        ("a|b\n1|x, y\n2|z\n", "a: 1; b: x, y\na: 2; b: z"),
        ("name\nAda Quill\nBo Reed\n", "name: Ada Quill\nname: Bo Reed"),
        ('a,b\n"x\ny;z",2\n', "a: x y;z; b: 2"),
    ],
)
def test_the_columns_of_a_table_are_found(content: str, expected: str) -> None:
    assert text("a.csv", content) == expected


def test_a_very_long_cell_is_read_and_a_quote_without_end_is_told() -> None:
    assert len(text("a.csv", "a,b\n1," + "x" * 200_000)) > 200_000
    document = read("a.csv", 'a,b\n1,2\n3,"4\n5,6\n')
    assert ("line 3" in lost(document), "4 5,6" in document.text) == (True, True)


# PDF, EPUB, JSON lines


def test_the_values_of_a_pdf_form_are_read() -> None:
    found = text("a.pdf", sample_files.pdf_form(name="Ada Quill", town="Marl"))
    assert found == "A form.\n\nname: Ada Quill\ntown: Marl"


@pytest.mark.parametrize(
    ("mapped", "expected", "told"),
    [
        ("D835", "\ufffdB", "1 characters are no text"),
        ("D835DC9C", "\U0001d49cB", ""),
        ("0000", "B", ""),
        ("00410000", "AB", ""),
    ],
)
def test_a_glyph_that_maps_to_no_character_costs_this_glyph(
    mapped: str, expected: str, told: str
) -> None:
    document = read("a.pdf", sample_files.pdf_mapping(mapped))
    assert document.text == expected
    assert lost(document)[: len(told)] == told and bool(told) == (LOST in document.metadata)


def book(**chapters: bytes | None) -> bytes:
    items = "".join(f'<item id="{name}" href="{name}.xhtml"/>' for name in chapters)
    spine = "".join(f'<itemref idref="{name}"/>' for name in (*chapters, "undeclared"))
    package = f'<package xmlns="http://www.idpf.org/2007/opf"><manifest>{items}</manifest><spine>{spine}</spine></package>'
    container = (
        '<container xmlns="urn:x"><rootfiles><rootfile full-path="b.opf"/></rootfiles></container>'
    )
    files = {f"{name}.xhtml": data for name, data in chapters.items() if data is not None}
    return sample_files.zipped({"META-INF/container.xml": container, "b.opf": package, **files})


def test_a_bad_chapter_costs_this_chapter() -> None:
    latin = b'<?xml version="1.0" encoding="iso-8859-1"?><p>caf\xe9</p>'
    utf16 = "<p>wide</p>".encode("utf-16")
    document = read(
        "a.epub",
        book(one=b"<p>first</p>", two=None, three=b"<p>caf\xe9</p>", four=latin, five=utf16),
    )
    assert document.text == "first\n\ncaf\u00e9\n\nwide"
    assert [re.match(r"chapter \d", loss)[0] for loss in document.metadata[LOST]] == [
        "chapter 2",
        "chapter 3",
        "chapter 6",
    ]  # type: ignore[index]
    with pytest.raises(DocumentError, match="chapter 1"):
        text("a.epub", book(one=None))


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ('{"text": "half \\ud800"}', "half a character"),
        ('{"text": "x", "n": NaN}', "NaN is no JSON number"),
        ('{"text": "x", "n": -Infinity}', "Infinity"),
        ('{"id": "one", "text": "other"}', "line 1 has the id 'one'"),
        ('{"text": "x", "m": "a\\u0000b"}', "NUL"),
        ('{"text": "a\\u0000b"}', "NUL"),
        ('{"text": "caf\udce9"}', "it is not utf-8: byte 0xe9 at offset 13"),
        ('{"text": "a\0b"}', "zero byte"),
        ("[" * 100_000, "not JSON"),
        ('{"text": " "}', "`text`"),
    ],
)
def test_a_bad_line_costs_this_line(line: str, why: str) -> None:
    good = json.dumps({"id": "one", "text": "good"})
    loaded = list(
        load_bytes(Path("a.jsonl"), f"{good}\n{line}\n{good}\n".encode("utf-8", "surrogateescape"))
    )
    errors = [str(one) for one in loaded if isinstance(one, DocumentError)]
    assert ([one.id for one in loaded if isinstance(one, Document)], len(errors)) == (
        [f"{Path('a.jsonl').absolute()}/one"] * 2,
        1,
    )
    assert "line 2: " in errors[0] and why in errors[0]


# Time


SPAN = "/Span << /ActualText (abc) >> BDC (x) Tj EMC "
HOSTILE: dict[str, Callable[[int], bytes | str]] = {
    "tags.html": lambda n: "<a " * n,
    "comments.html": lambda n: "<!--" * n,
    "deep.html": lambda n: "<div>" * n + "</b>" * n + "x",
    "cells.html": lambda n: "<table><tr>" + "<td rowspan=9999 colspan=99>x" * n,
    "quotes.csv": lambda n: '"' * n + "\n",
    "mixed.csv": lambda n: 'a;"b,c"|d\t' * n,
    "to.eml": lambda n: mail(b"x", subject=b"=?utf-8?q?a?= " * n),
    "lines.jsonl": lambda n: '{"text": "x"}\n{\n' * (n // 4),
    "scripts.html": lambda n: "<sup>x" * (n // 10) + "10<sup>6</sup>" * (n // 10),
    "notes.html": lambda n: "<a href='#a'><sup>1</sup></a>" * (n // 20) + "<p id=a>x" * (n // 20),
    "sheets.html": lambda n: "<style>.a{vertical-align:super} .b,</style><b class=a>" * (n // 40),
    "styles.html": lambda n: "<b style='vertical-align:" + "(" * n + "'>x",
    "struck.html": lambda n: "<s>1" * (n // 10) + "<ruby>a<rt>b" * (n // 10) + "<q>" * (n // 10),
    "hidden.html": lambda n: (
        "<p hidden>" + "<math>1</math> " * (n // 10) + "<p hidden>x" * (n // 20)
    ),
    "links.html": lambda n: "<a href='#a'>1</a>" * (n // 20) + "<a href='#b'>" * (n // 20),
    "spans.html": lambda n: (
        "<table><tr>" + "<td rowspan=99 colspan=99>xyz" * 50 + "<tr><td>y" * (n // 8)
    ),
    "formula.html": lambda n: "<math>" + "<mrow>" * (n // 10) + "<msup><mi>x" * (n // 10),
    "fractions.html": lambda n: "<math>" + "<mfrac>1" * (n // 20) + "<mover><mi>x" * (n // 20),
    "letters.html": lambda n: "<math><mi>" + "&amp;" * (n // 5) + "</mi>" + "<mn>1</mn>" * (n // 9),
    "names.csv": lambda n: f"{'n' * (n // 3)},b\nz,{'x' * 99}\n" + "1,2\n" * (n // 6),
    "commas.csv": lambda n: "," * n + "\n" + "," * n,
    "rule.md": lambda n: "|a\n|" + " " * n + "\n" + "|a|b\n|-|-\n" * (n // 10),
    "references.md": lambda n: "&#1" * (n // 3) + "&" * n,
    "escapes.json": lambda n: "\\" * n + "\\u00e9" * (n // 6),
    "orders.log": lambda n: "\x1b[" + "1" * n + "\x1b]" * (n // 2) + "a\x08" * (n // 2),
    "tags.vtt": lambda n: "WEBVTT\n\n00:01.0 --> 00:02.0\n" + "<v." * (n // 3),
    "blank.srt": lambda n: "\n \t" * n,
    "broken.pdf": lambda n: pdf_of(f"BT 72 700 Td /F1 1 Tf {SPAN * (n // 20)} ET"),
    "encoding.eml": lambda n: mail(b"a" * n, "punycode"),
}


@pytest.mark.parametrize("name", sorted(HOSTILE))
def test_no_file_takes_more_than_linear_time(name: str) -> None:
    def seconds(size: int) -> float:
        data = HOSTILE[name](size)
        given = data.encode() if isinstance(data, str) else data

        def load() -> None:
            with contextlib.suppress(DocumentError):
                list(load_bytes(Path(name), given))

        return processor_seconds(load)

    seconds(10)  # imports
    assert_linear(seconds, 20_000)
