"""Files are loaded as documents, or become errors that say what to do."""

import json
import os
import sys
from pathlib import Path

import pytest

from ragkv.errors import DocumentError, MissingExtraError
from ragkv.retrieval import Document, load_documents

from . import sample_files


def write(path: Path, content: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def test_a_directory_is_walked_recursively_in_sorted_order(tmp_path: Path) -> None:
    for name in ("b.txt", "a/z.md", "a/c.txt"):
        write(tmp_path / name, f"text of {name}")
    assert [Path(d.id).name for d in load_documents(tmp_path)] == ["c.txt", "z.md", "b.txt"]


def test_a_document_id_is_the_absolute_path_however_the_file_was_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write(tmp_path / "a.txt", "text")
    monkeypatch.chdir(tmp_path)
    assert [d.id for d in load_documents("a.txt")] == [d.id for d in load_documents([file])] == [str(file)]


def test_a_json_line_is_a_document_whose_other_keys_are_metadata(tmp_path: Path) -> None:
    lines = [
        {"id": "a", "text": "one", "metadata": {"year": 1}, "title": "T"},
        {"id": 7, "text": "two", "source": "here"},
        {"text": "three"},
    ]
    file = write(tmp_path / "x.jsonl", "\n".join(map(json.dumps, lines)) + "\n\n")
    assert list(load_documents(file)) == [
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
        list(load_documents(file))
    assert name in str(caught.value)


def test_a_missing_path_and_a_directory_without_documents_are_errors(tmp_path: Path) -> None:
    with pytest.raises(DocumentError, match="no such file"):
        list(load_documents(tmp_path / "none.txt"))
    with pytest.raises(DocumentError, match="No documents under"):
        list(load_documents(tmp_path))


def test_a_path_that_is_no_regular_file_is_an_error_and_never_blocks(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.txt")
    with pytest.raises(DocumentError, match="neither a file nor a directory"):
        list(load_documents(tmp_path / "pipe.txt"))


@pytest.mark.parametrize("encoding", ["klingon", "hex"])
def test_an_unknown_encoding_is_an_error(tmp_path: Path, encoding: str) -> None:
    with pytest.raises(DocumentError, match=f"unknown encoding '{encoding}'"):
        list(load_documents(write(tmp_path / "a.txt", "x"), encoding=encoding))


def test_with_on_error_the_rest_is_still_loaded_and_every_error_reported(tmp_path: Path) -> None:
    write(tmp_path / "a.txt", "good")
    write(tmp_path / "b.txt", b"\x00")
    write(tmp_path / "c.jsonl", '{"id": "c1", "text": "good"}\n{\n{"id": "c3", "text": "good"}')
    errors: list[DocumentError] = []
    ids = [Path(d.id).name for d in load_documents(tmp_path, on_error=errors.append)]
    assert ids == ["a.txt", "c1", "c3"]
    assert [("b.txt" in str(e), "line 2" in str(e)) for e in errors] == [(True, False), (False, True)]


def test_page_starts_point_to_the_first_character_of_each_pdf_page(tmp_path: Path) -> None:
    pytest.importorskip("pypdf", reason="needs pypdf (extra pdf)")
    (document,) = load_documents(write(tmp_path / "two.pdf", sample_files.pdf("First page.", "Second page.")))
    assert document.text == "First page.\n\nSecond page."
    assert [document.text[start:].split("\n")[0] for start in document.page_starts] == ["First page.", "Second page."]


def test_a_pdf_without_the_extra_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pypdf", None)
    with pytest.raises(MissingExtraError, match=r'pip install "ragkv\[pdf\]"'):
        list(load_documents(write(tmp_path / "a.pdf", "%PDF")))
