"""Files are loaded as documents, or become errors that say what to do."""

import json
import os
import sys
from pathlib import Path

import pytest

from ragkv.errors import DocumentError, MissingExtraError
from ragkv.retrieval import Document

from . import sample_files
from .sample_files import load


def write(path: Path, content: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def test_a_json_line_is_a_document_whose_other_keys_are_metadata(tmp_path: Path) -> None:
    lines = [
        {"id": "a", "text": "one", "metadata": {"year": 1}, "title": "T"},
        {"id": 7, "text": "two", "source": "here"},
        {"text": "three"},
    ]
    file = write(tmp_path / "x.jsonl", "\n".join(map(json.dumps, lines)) + "\n\n")
    assert list(load(file)) == [
        Document("a", "one", str(file), {"title": "T", "year": 1}),
        Document("7", "two", "here"),
        Document(f"{file}#3", "three", str(file)),
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
    file = write(tmp_path / name, content)
    with pytest.raises(DocumentError, match=reason) as caught:
        list(load(file))
    assert name in str(caught.value)


def test_a_path_that_is_no_regular_file_is_an_error_and_never_blocks(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.txt")
    with pytest.raises(DocumentError, match="neither a file nor a directory"):
        list(load(tmp_path / "pipe.txt"))


@pytest.mark.parametrize("encoding", ["klingon", "hex"])
def test_an_unknown_encoding_is_an_error(tmp_path: Path, encoding: str) -> None:
    with pytest.raises(DocumentError, match=f"unknown encoding '{encoding}'"):
        list(load(write(tmp_path / "a.txt", "x"), encoding=encoding))


def test_page_starts_point_to_the_first_character_of_each_pdf_page(tmp_path: Path) -> None:
    pytest.importorskip("pypdf", reason="needs pypdf (extra pdf)")
    (document,) = load(write(tmp_path / "two.pdf", sample_files.pdf("First page.", "Second page.")))
    assert document.text == "First page.\n\nSecond page."
    assert [document.text[start:].split("\n")[0] for start in document.page_starts] == ["First page.", "Second page."]


def test_a_pdf_without_the_extra_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pypdf", None)
    with pytest.raises(MissingExtraError, match=r'pip install "ragkv\[pdf\]"'):
        list(load(write(tmp_path / "a.pdf", "%PDF")))
