"""`ragkv ingest` on the command line: progress in a log, encodings, pages in sources, and files
that hold brackets.
"""

import re
from pathlib import Path

import pytest

from ragkv.cli import output
from tests.rag import forty_files
from tests.retrieval import sample_files

from .conftest import Run


def test_the_printed_report_counts_40_files_and_names_each_that_was_not_read(
    run: Run, tmp_path: Path
) -> None:
    expected = forty_files.make(tmp_path / "forty")
    ran = run("ingest", tmp_path / "forty", "--minutes", "0")
    counts = [
        int(count)
        for count in re.findall(r"(\d+) (?:added|ignored|failed)", ran.out.split("\n")[0])
    ]
    assert (ran.code, sum(counts)) == (1, 40)
    for name, status in expected.items():
        assert status == "added" or Path(name).name in ran.out, name


def test_an_encoding_can_be_named_or_guessed(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_bytes(
        "Die M\u00fchle in der gro\u00dfen Stra\u00dfe ist sch\u00f6n. ".encode("latin-1") * 3
    )
    refused = run("ingest", file, "--minutes", "0")
    assert (refused.code, "--encoding" in refused.err) == (1, True)
    assert run("ingest", file, "--minutes", "0", "--encoding", "latin-1").code == 0
    assert run("ingest", file, "--minutes", "0", "--encoding", "auto").code == 0
    assert (
        "unknown encoding 'klingon'"
        in run("ingest", file, "--minutes", "0", "--encoding", "klingon").err
    )


def test_sources_of_a_pdf_name_its_pages(run: Run, tmp_path: Path) -> None:
    pytest.importorskip("pypdf", reason="needs pypdf (extra pdf)")
    (tmp_path / "two.pdf").write_bytes(
        sample_files.pdf("The mill of Marl. " * 40, "Ada Quill founded the town.")
    )
    run("ingest", tmp_path / "two.pdf", "--chunk-tokens", "40")
    asked = run("ask", "who founded the town ?", "-k", "1", "--max-new-tokens", "1")
    assert "two.pdf (page 2)" in asked.out
    assert run("ask", "who founded the town ?", "-k", "1", "--max-new-tokens", "1", "--json").json[
        "hits"
    ][0]["passage"]["metadata"] == {"page": 2}


def test_a_log_says_what_is_read_and_how_far_it_is(
    run: Run, documents: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (documents / "[red]x.txt").write_text("text")
    monkeypatch.setattr(output, "FIRST_LINE_S", 0.0)
    monkeypatch.setattr(output, "LINE_EVERY_S", 0.0)
    lines = run("ingest", documents).err.splitlines()
    assert any(re.match(r"reading .*\[red\]x\.txt: \d of 3", line) for line in lines)
    assert any(line.startswith("computing KV, chunks: 3 of 3") for line in lines)


def test_a_folder_without_documents_is_reported_and_is_an_error(run: Run, tmp_path: Path) -> None:
    (tmp_path / "photo.png").write_bytes(b"x")
    ran = run("ingest", tmp_path / "photo.png")
    assert (ran.code, "no loader for '.png'" in ran.err) == (1, True)
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "photo.png").write_bytes(b"x")
    ran = run("ingest", tmp_path / "folder")
    assert (ran.code, "1 ignored" in ran.out, "No documents in" in ran.err) == (1, True, True)
