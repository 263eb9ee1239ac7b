"""Files of every format become documents; broken and hostile ones become errors that say what to
do.
"""

import contextlib
import io
import json
import os
import sys
import zipfile
from pathlib import Path

import pytest

from ragkv.errors import DocumentError, DocumentLimitError, MissingExtraError
from ragkv.retrieval import Document, ParseLimits
from ragkv.retrieval.documents import formats
from ragkv.retrieval.documents.files import FoundFile, find_files

from . import sample_files


def load(tmp_path: Path, name: str, data: bytes | str, **options: object) -> Document:
    file = tmp_path / name
    file.write_bytes(data.encode() if isinstance(data, str) else data)
    (document,) = sample_files.load(file, **options)  # type: ignore[arg-type]
    return document


def test_a_docx_keeps_headings_and_the_rows_of_tables(tmp_path: Path) -> None:
    document = load(tmp_path, "a.docx", sample_files.docx())
    assert (
        document.text
        == "# Founding\n\nThe mill was founded by Ada Quill.\n\npart\tmade of\nwheel\toak"
    )
    assert document.metadata == {"format": "markdown", "title": "The mill"}


def test_slides_of_a_pptx_are_its_pages_and_notes_are_read(tmp_path: Path) -> None:
    document = load(tmp_path, "a.pptx", sample_files.pptx())
    assert (
        document.text
        == "The mill\n\nIt makes paper.\n\nThe town\n\nIt lies on a river.\n\nSay where it lies."
    )
    assert [document.text[start:].split("\n")[0] for start in document.page_starts] == [
        "The mill",
        "The town",
    ]


def test_each_row_of_an_xlsx_names_its_columns(tmp_path: Path) -> None:
    document = load(tmp_path, "a.xlsx", sample_files.xlsx())
    assert document.text == "# People\n\nname: Ada Quill; born: 1790\nname: Bo Reed; born: 1801"


def test_the_chapters_of_an_epub_come_in_reading_order(tmp_path: Path) -> None:
    document = load(tmp_path, "a.epub", sample_files.epub())
    assert (document.text, document.metadata) == (
        "# One\n\nThe beginning.\n\nThe end.",
        {"format": "markdown", "title": "Of mills"},
    )


def test_a_mail_has_its_headers_its_plain_body_and_the_names_of_attachments(tmp_path: Path) -> None:
    document = load(tmp_path, "a.eml", sample_files.eml())
    head, body = document.text.split("\n\n")
    assert head == "Subject: Wheel\nFrom: Ada <ada@example.org>\nTo: bo@example.org"
    assert body == "The wheel is of oak, caf\u00e9 included."
    assert document.metadata == {"title": "Wheel", "attachments": ["plan.bin"]}


def test_a_table_of_one_row_or_with_longer_rows_loses_no_value(tmp_path: Path) -> None:
    assert load(tmp_path, "a.csv", "only,this\n").text == "only; this"
    assert load(tmp_path, "c.tsv", "name\tborn\nAda\t1790\n").text == "name: Ada; born: 1790"
    assert load(tmp_path, "b.csv", "name\nAda,1790\n").text == "name: Ada; 1790"


def test_source_code_and_a_readme_without_an_ending_are_text(tmp_path: Path) -> None:
    assert (
        load(tmp_path, "mill.py", "def mill():\n    return 1\n").text
        == "def mill():\n    return 1\n"
    )
    assert load(tmp_path, "README", "The mill.\r\n").text == "The mill.\n"


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-16-le", "utf-32"])
def test_a_byte_order_mark_names_the_encoding(tmp_path: Path, encoding: str) -> None:
    mark = "\ufeff" if encoding == "utf-16-le" else ""
    assert (
        load(tmp_path, "a.txt", f"{mark}caf\u00e9 und Stra\u00dfe".encode(encoding)).text
        == "caf\u00e9 und Stra\u00dfe"
    )


def test_text_that_is_not_utf_8_is_read_if_its_encoding_is_named(tmp_path: Path) -> None:
    with pytest.raises(DocumentError, match=r"is not utf-8.*latin-1, or auto"):
        load(tmp_path, "a.txt", "Stra\u00dfe".encode("latin-1"))
    assert (
        load(tmp_path, "a.txt", "Stra\u00dfe".encode("latin-1"), encoding="latin-1").text
        == "Stra\u00dfe"
    )
    assert load(tmp_path, "a.txt", "Stra\u00dfe", encoding="auto").text == "Stra\u00dfe"


@pytest.mark.parametrize(
    ("text", "encoding"),
    [
        ("caf\u00e9 au lait", "latin-1"),
        ("Das M\u00fchlrad in der Stra\u00dfe ist gro\u00df und h\u00f6lzern. " * 5, "latin-1"),
        ("El ni\u00f1o comi\u00f3 pi\u00f1a", "latin-1"),
        ("sch\u00f6n", "cp1252"),
        ("\u3053\u3093\u306b\u3061\u306f\u4e16\u754c", "shift_jis"),
        (
            "\u041c\u0435\u043b\u044c\u043d\u0438\u0446\u0430 \u0441\u0442\u0430\u0440\u0430",
            "cp1251",
        ),
    ],
)
def test_an_encoding_is_guessed_also_of_a_short_text(
    tmp_path: Path, text: str, encoding: str
) -> None:
    assert load(tmp_path, "a.txt", text.encode(encoding), encoding="auto").text == text


OFFICE = (".docx", ".pptx", ".xlsx", ".epub")


@pytest.mark.parametrize("suffix", OFFICE)
@pytest.mark.parametrize(
    "data", [b"not an archive", sample_files.zipped({"x": "y"}), sample_files.docx()[:-200]]
)
def test_a_broken_archive_is_an_error_that_names_the_file(
    tmp_path: Path, suffix: str, data: bytes
) -> None:
    with pytest.raises(DocumentError, match=rf"broken\{suffix} as {suffix[1:].upper()}"):
        load(tmp_path, f"broken{suffix}", data)


@pytest.mark.parametrize("suffix", OFFICE)
def test_an_archive_that_would_unpack_to_too_much_is_refused_before_it_is_parsed(
    tmp_path: Path, suffix: str
) -> None:
    bomb = sample_files.zipped({"word/document.xml": b"0" * 5_000_000})
    assert len(bomb) < 10_000
    with pytest.raises(DocumentLimitError, match="inflated_bytes"):
        load(tmp_path, f"bomb{suffix}", bomb, limits=ParseLimits(inflated_bytes=1_000_000))


ENTITIES = """<?xml version="1.0"?><!DOCTYPE x [<!ENTITY a "aaaaaaaaaa"><!ENTITY b "&a;&a;&a;&a;&a;&a;&a;&a;">
<!ENTITY secret SYSTEM "file:///etc/passwd">]>"""


def with_entities(data: bytes, part: str, after: str) -> bytes:
    """An office file in whose `part` entities are declared, and used after the text `after`."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    xml = (
        files[part].decode().partition("?>")[2]
        if files[part].startswith(b"<?xml")
        else files[part].decode()
    )
    assert after in xml
    return sample_files.zipped(
        {**files, part: (ENTITIES + xml.replace(after, f"{after}&b;&secret;", 1)).encode()}
    )


@pytest.mark.parametrize(
    ("suffix", "data", "part", "after"),
    [
        (".docx", sample_files.docx(), "word/document.xml", "The mill was "),
        (".pptx", sample_files.pptx(), "ppt/slides/slide1.xml", "It makes "),
        (".xlsx", sample_files.xlsx(), "xl/worksheets/sheet1.xml", "Ada "),
        (".epub", sample_files.epub(), "text/book.opf", "Of "),
    ],
)
def test_no_entity_of_an_office_file_is_resolved(
    tmp_path: Path, suffix: str, data: bytes, part: str, after: str
) -> None:
    with contextlib.suppress(DocumentError):
        document = load(tmp_path, f"entities{suffix}", with_entities(data, part, after))
        assert "root:" not in f"{document.text} {document.metadata}"
        assert "aaaaaaaaaa" not in f"{document.text} {document.metadata}"


@pytest.mark.parametrize(
    ("name", "library"),
    [
        ("a.docx", "mammoth"),
        ("a.pptx", "pptx"),
        ("a.xlsx", "openpyxl"),
        ("a.pdf", "pypdf"),
        ("a.pdf", "pypdfium2"),
    ],
)
def test_a_file_without_its_extra_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, library: str
) -> None:
    extra = "pdf" if library.startswith("pypdf") else "office"
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(MissingExtraError, match=rf'pip install "ragkv\[{extra}\]"'):
        load(tmp_path, name, b"PK")


def test_every_loader_turns_noise_into_one_error_and_never_into_another_exception(
    tmp_path: Path,
) -> None:
    noise = bytes(range(256)) * 8
    for suffix in formats.FORMATS:
        with pytest.raises(DocumentError):
            load(tmp_path, f"noise{suffix}", noise)


def test_every_row_of_the_formats_names_a_loader_and_any_other_ending_is_text() -> None:
    for suffix in formats.FORMATS:
        assert formats.loader_of(suffix).__name__ == formats.FORMATS[suffix].split(":")[1]
    assert formats.loader_of("").__name__ == formats.loader_of(".txt").__name__ == "load_text"
    assert formats.loader_of(".zzz").__name__ == formats.loader_of(".py").__name__ == "load_program"


def test_a_format_is_one_row_and_one_function(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calendar = tmp_path / "week.ics"
    calendar.write_text("SUMMARY:tea")
    assert find_files([tmp_path]) == [FoundFile(calendar, "ignored", "no loader for .ics")]
    monkeypatch.setitem(formats.FORMATS, ".ics", "text:load_text")
    assert find_files([tmp_path]) == [FoundFile(calendar, "read")]
    assert [one.text for one in sample_files.load(calendar)] == ["SUMMARY:tea"]


def test_a_json_line_is_a_document_whose_other_keys_are_metadata(tmp_path: Path) -> None:
    lines = [
        {"id": "a", "text": "one", "metadata": {"year": 1}, "title": "T"},
        {"id": 7, "text": "two", "source": "here"},
        {"text": "three"},
    ]
    file = tmp_path / "x.jsonl"
    file.write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    assert sample_files.load(file) == [
        Document(f"{file}/a", "one", str(file), {"title": "T", "year": 1}),
        Document(f"{file}/7", "two", "here"),
        Document(f"{file}/line 3", "three", str(file)),
    ]


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("empty.txt", "", "is empty"),
        ("blank.md", " \n ", "is empty"),
        ("binary.txt", b"MZ\x00\x01", "looks binary: zero byte at offset 2"),
        ("latin.txt", b"caf\xe9", "is not utf-8: byte 0xe9 at offset 3"),
        ("only.html", "<script>x</script>", "holds no text"),
        ("photo.png", "x", "no loader for '.png'"),
        ("broken.pdf", "%PDF-1.4 nothing", "Cannot read .* as PDF"),
        ("bad.jsonl", "{", r"line 1: not JSON \(Expecting property name .* at column 2\)"),
        ("bad.jsonl", "[1]", "line 1: a JSON list"),
        ("bad.jsonl", '{"id": "a"}', "line 1: `text` is None"),
        ("bad.jsonl", '{"id": 1.5, "text": "x"}', "line 1: `id` is 1.5"),
        ("bad.jsonl", '{"id": "a", "text": "x", "metadata": 3}', "line 1: `metadata` is 3"),
    ],
)
def test_a_bad_document_is_an_error_that_names_the_file(
    tmp_path: Path, name: str, content: str | bytes, reason: str
) -> None:
    with pytest.raises(DocumentError, match=reason) as caught:
        load(tmp_path, name, content)
    assert name in str(caught.value)


def test_a_path_that_is_no_regular_file_is_an_error_and_never_blocks(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.txt")
    with pytest.raises(DocumentError, match="neither a file nor a directory"):
        sample_files.load(tmp_path / "pipe.txt")


@pytest.mark.parametrize("encoding", ["klingon", "hex"])
def test_an_unknown_encoding_is_an_error(tmp_path: Path, encoding: str) -> None:
    with pytest.raises(DocumentError, match=f"unknown encoding '{encoding}'"):
        load(tmp_path, "a.txt", "x", encoding=encoding)


def test_page_starts_point_to_the_first_character_of_each_pdf_page(tmp_path: Path) -> None:
    document = load(tmp_path, "two.pdf", sample_files.pdf("First page.", "Second page."))
    assert document.text == "First page.\n\nSecond page."
    assert [document.text[start:].split("\n")[0] for start in document.page_starts] == [
        "First page.",
        "Second page.",
    ]
