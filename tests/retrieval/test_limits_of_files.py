"""A small file stays small: bytes bound text, the end of a process bounds time and memory."""

import io
import re
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ragkv.errors import DocumentError, DocumentLimitError, MissingExtraError
from ragkv.retrieval import Document, ParseLimits, load_bytes
from ragkv.retrieval.documents import alone
from ragkv.retrieval.documents.alone import LoneParser
from ragkv.retrieval.documents.reading import CHARS_PER_BYTE, LEAST_CHARS, codec_of
from tests.runtime import lone_work

from . import sample_files
from .read_files import lost, read, text
from .test_formats import ENTITIES

SHEET = 'xmlns="http://schemas.openxmlformats.org/spreadsheetml/2006/main"'


def replaced(data: bytes, **parts: str) -> bytes:
    """An Office file with other contents of some of its parts, which are named by their ends."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    for end, content in parts.items():
        name = next(name for name in files if name.endswith(f"{end}.xml"))
        files[name] = content.encode()
    return sample_files.zipped(dict(files))


def shared_string(n: int) -> bytes:
    """A long text that n cells refer to."""
    cells = "".join(f'<row r="{k}"><c r="A{k}" t="s"><v>0</v></c></row>' for k in range(1, n))
    book = replaced(
        sample_files.xlsx(), sheet1=f"<worksheet {SHEET}><sheetData>{cells}</sheetData></worksheet>"
    )
    with zipfile.ZipFile(io.BytesIO(book)) as archive:
        files: dict[str, Any] = {name: archive.read(name) for name in archive.namelist()}
    files["xl/sharedStrings.xml"] = f"<sst {SHEET}><si><t>{'mill ' * 4000}</t></si></sst>"
    kind = "application/vnd.openxmlformats-officedocument.spreadsheetml.sharedStrings+xml"
    part = f'<Override PartName="/xl/sharedStrings.xml" ContentType="{kind}"/></Types>'
    types = "[Content_Types].xml"
    files[types] = files[types].decode().replace("</Types>", part)
    return sample_files.zipped(files)


def sheets(n: int) -> bytes:
    """A sheet that the workbook has n times."""
    data = sample_files.xlsx()
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        book = archive.read("xl/workbook.xml").decode()
    found = re.search('<sheet [^>]*name="People"[^>]*>', book)
    assert found is not None
    more = "".join(found.group().replace("People", f"P{k}") for k in range(1, n))
    return replaced(data, workbook=book.replace(found.group(), found.group() + more))


def slides(n: int) -> bytes:
    """A slide that the presentation has n times."""
    data = sample_files.pptx()
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        show = archive.read("ppt/presentation.xml").decode()
    found = re.search("<p:sldId [^>]*>", show)
    assert found is not None
    more = "".join(re.sub(r'\bid="\d+"', f'id="{900 + k}"', found.group()) for k in range(1, n))
    return replaced(data, presentation=show.replace(found.group(), found.group() + more))


def chapters(n: int) -> bytes:
    """A long chapter that the reading order has n times."""
    container = '<c xmlns="u"><rootfile full-path="b.opf"/></c>'
    spine = '<itemref idref="a"/>' * n
    package = f'<p><manifest><item id="a" href="a.x"/></manifest><spine>{spine}</spine></p>'
    return sample_files.zipped(
        {"META-INF/container.xml": container, "b.opf": package, "a.x": "mill " * 4000}
    )


def test_a_text_that_a_file_names_again_and_again_is_refused() -> None:
    with pytest.raises(DocumentLimitError, match="which is the most for a document of its size"):
        list(load_bytes(Path("a.xlsx"), shared_string(3000)))


@pytest.mark.parametrize(
    ("name", "made", "told"),
    [
        ("a.xlsx", sheets, "sheet P1, which is sheet People once more"),
        ("a.pptx", slides, "slide 2, which is slide 1 once more"),
        ("a.epub", chapters, "chapter 2, which is chapter 1 once more"),
    ],
)
def test_a_part_that_a_file_has_again_and_again_is_read_once_and_told(
    name: str, made: Callable[[int], bytes], told: str
) -> None:
    once = read(name, made(1))
    many = read(name, made(400))
    assert many.text.split() == once.text.split()
    assert told in lost(many) and "once more" not in lost(once)


@pytest.mark.parametrize("has_chart", [False, True])
@pytest.mark.parametrize("at", [0, 1])
def test_a_sheet_of_charts_does_not_hinder_the_others(has_chart: bool, at: int) -> None:
    import openpyxl
    from openpyxl.chart import LineChart, Reference

    book = openpyxl.Workbook()
    book.active.append(["mill", "bales"])
    book.active.append(["Marl", 3])
    charts = book.create_chartsheet("Charts", at)
    if has_chart:
        chart = LineChart()
        chart.add_data(Reference(book["Sheet"], min_col=2, min_row=2))
        charts.add_chart(chart)
    book.create_sheet("Towns").append(["Kell"])
    book["Towns"].print_area = "A1:A1"
    out = io.BytesIO()
    book.save(out)
    assert text("a.xlsx", out.getvalue()) == "# Sheet\n\nmill: Marl; bales: 3\n\n# Towns\n\nKell"


@pytest.mark.parametrize(
    "rows",
    [
        lambda n: f"{'n' * 20_000},b\n" + "1,2\n" * n,
        lambda n: ",".join(["n" * 500] * 40) + "\n" + ",".join("1" * 40) + "\n" * n,
        lambda n: f"{'k' * 3000},{'n' * 90}\n" + f"{'v' * 300},1\n" * n,
    ],
)
def test_names_of_columns_in_each_row_take_a_share_of_the_bytes(rows: Callable[[int], str]) -> None:
    data = rows(5000).encode()
    (document,) = load_bytes(Path("a.csv"), data)
    assert isinstance(document, Document)
    assert len(document.text) < max(LEAST_CHARS, CHARS_PER_BYTE * len(data))


@pytest.mark.parametrize("far", [1_000_000_000, 1_048_576, 10**15])
def test_a_row_far_down_costs_a_row(far: int) -> None:
    rows = "".join(
        f'<row r="{number}"><c t="inlineStr"><is><t>{text}</t></is></c></row>'
        for number, text in ((1, "mill"), (far, "Marl"))
    )
    made = replaced(
        sample_files.xlsx(), sheet1=f"<worksheet {SHEET}><sheetData>{rows}</sheetData></worksheet>"
    )
    (document,) = load_bytes(Path("a.xlsx"), made)
    assert isinstance(document, Document)
    assert document.text == "# People\n\nmill: Marl"


@pytest.mark.parametrize(
    "name", ["punycode", "idna", "unicode-escape", "raw_unicode_escape", "undefined"]
)
def test_encodings_that_are_pythons_own_are_none_of_a_file(name: str) -> None:
    assert codec_of(name) is None
    mail = f'Subject: x\nContent-Type: text/plain; charset="{name}"\n\nThe mill-'
    (document,) = load_bytes(Path("a.eml"), mail.encode())
    assert isinstance(document, Document)
    assert (document.text, "unknown encoding" in str(document.metadata)) == (
        "Subject: x\n\nThe mill-",
        True,
    )


@pytest.mark.parametrize("part", ["word/notes.bin", "word/media/a.png", "custom"])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-16"])
def test_entities_are_found_in_parts_of_any_name(part: str, encoding: str) -> None:
    with zipfile.ZipFile(io.BytesIO(sample_files.docx())) as archive:
        files: dict[str, str | bytes] = {name: archive.read(name) for name in archive.namelist()}
    files[part] = f"{ENTITIES}<x>&b;</x>".encode(encoding)
    with pytest.raises(DocumentError, match="declares XML entities"):
        list(load_bytes(Path("a.docx"), sample_files.zipped(files)))


# Time and memory


@pytest.fixture
def parser() -> Iterator[LoneParser]:
    with LoneParser(seconds=20, memory_bytes=512 << 20) as parser:
        yield parser


def test_a_file_is_parsed_in_another_process_as_in_this_one(parser: LoneParser) -> None:
    data = sample_files.docx()
    there = list(parser.load(Path("a.docx"), data, None, ParseLimits()))
    assert there == list(load_bytes(Path("a.docx"), data))
    with pytest.raises(DocumentError, match=r"Cannot read a\.docx as DOCX"):
        list(parser.load(Path("a.docx"), b"no archive", None, ParseLimits()))
    with pytest.raises(DocumentLimitError, match="document_chars") as caught:
        list(parser.load(Path("a.txt"), b"word " * 9, None, ParseLimits(document_chars=9)))
    assert caught.value.limit == "document_chars"


@pytest.mark.parametrize(
    ("work", "seconds", "error", "why"),
    [
        (lone_work.endless, 2.0, DocumentError, "took more than 2 s"),
        (lone_work.large, 60.0, DocumentError, "took more than 512 MiB of memory"),
        (lone_work.refused, 60.0, MissingExtraError, "pip install"),
    ],
)
def test_a_file_that_takes_too_much_costs_this_file(
    monkeypatch: pytest.MonkeyPatch,
    work: Callable[..., object],
    seconds: float,
    error: type[Exception],
    why: str,
) -> None:
    with LoneParser(seconds, memory_bytes=512 << 20) as parser:
        monkeypatch.setattr(alone, "_load", work)
        with pytest.raises(error, match=why):
            list(parser.load(Path("a.txt"), b"x", None, ParseLimits()))
        monkeypatch.undo()
    with LoneParser() as parser:
        (document,) = parser.load(Path("a.txt"), b"The mill.", None, ParseLimits())
        assert isinstance(document, Document)
