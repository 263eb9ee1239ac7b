"""A file is read as what it is by its bytes, or refused with a sentence that says what it is."""

import codecs
import io

import pytest

from ragkv.errors import DocumentError

from . import sample_files
from .pdf_files import pdf_of, text_at
from .read_files import book, text

MILL = pdf_of(text_at(700, "The mill"))


@pytest.mark.parametrize(
    ("name", "data", "expected"),
    [
        ("a.txt", MILL, "The mill"),
        ("b.txt", "Rar! said the crow.", "Rar! said the crow."),
        ("a.docx", MILL, "The mill"),
        ("a.csv", MILL, "The mill"),
        ("a.md", sample_files.word(sample_files.paragraph("Of oak")), "Of oak"),
        ("a.pdf", sample_files.word(sample_files.paragraph("Of oak")), "Of oak"),
        ("a.xlsx", book("<p>Of rope</p>"), "Of rope"),
        ("a.epub", sample_files.xlsx(), text("b.xlsx", sample_files.xlsx())),
        ("a.docx", "<!DOCTYPE html><html><p>Of paper</p></html>", "Of paper"),
        ("a.pdf", "<html><p>Of paper</p></html>", "Of paper"),
        # text stays what its name says
        ("a.txt", "<!DOCTYPE html><html>x", "<!DOCTYPE html><html>x"),
        ("a.md", "%PDF-1.4 begins a PDF", "%PDF-1.4 begins a PDF"),
        ("a.txt", "From: a\nSubject: b\n\nc", "From: a\nSubject: b\n\nc"),
    ],
)
def test_a_file_is_read_as_what_its_bytes_are(name: str, data: bytes | str, expected: str) -> None:
    assert text(name, data) == expected


def test_an_archive_within_a_file_does_not_say_what_the_file_is() -> None:
    import zipfile

    made = io.BytesIO(sample_files.pptx())
    with zipfile.ZipFile(made, "a", zipfile.ZIP_STORED) as archive:
        archive.writestr("ppt/embeddings/a.docx", sample_files.docx())
        archive.writestr("word/strange.xml", "<a/>")
    assert text("a.pptx", made.getvalue()) == text("a.pptx", sample_files.pptx())
    assert "It makes paper." in text("a.pptm", made.getvalue())


@pytest.mark.parametrize(
    ("name", "data", "what"),
    [
        ("a.txt", b"\x89PNG\r\n\x1a\n\0\0", "is a picture"),
        ("a.md", sample_files.zipped({"a.txt": "x"}), "is an archive"),
        ("a.csv", b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1" + bytes(512), "old .* or has a password"),
        ("a.txt", b"{\\rtf1\\ansi Of oak}", "is rich text"),
        ("notes", b"\x1f\x8b\x08\0\0", "is an archive"),
        ("a.docx", b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1", "old .* or has a password"),
        ("a.pdf", b"\xff\xd8\xff\xe0", "is a picture"),
        ("a.xlsx", "mill,bales\nMarl,3\n", "Cannot read a.xlsx as XLSX"),
        ("a.docx", sample_files.zipped({"a.txt": "x"}), "Cannot read a.docx as DOCX"),
    ],
)
def test_what_cannot_be_read_is_named_by_its_bytes(name: str, data: bytes | str, what: str) -> None:
    with pytest.raises(DocumentError, match=what):
        text(name, data)


@pytest.mark.parametrize(
    ("name", "data", "expected"),
    [
        ("a.txt", codecs.BOM_UTF8 * 2 + b"Marl", "Marl"),
        ("a.md", codecs.BOM_UTF8 * 3 + b"# Marl", "# Marl"),
        ("a.csv", codecs.BOM_UTF8 * 2 + b'"mill","bales"\nMarl,3\n', "mill: Marl; bales: 3"),
        ("a.txt", codecs.BOM_UTF16_LE * 2 + "Marl".encode("utf-16-le"), "Marl"),
        ("a.txt", b"Marl\n" + codecs.BOM_UTF8 + b"Kell", "Marl\nKell"),
        ("a.html", "<p>\ufeffMarl&#xfeff;ow", "Marlow"),
    ],
)
def test_a_byte_order_mark_leaves_no_character(name: str, data: bytes | str, expected: str) -> None:
    assert text(name, data) == expected
