"""Files are ingested one by one: each has an outcome, unchanged ones are not read again, and none
is lost silently.
"""

import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import ragkv.rag.files
from ragkv import Engine, EngineConfig, StoreConfig
from ragkv.errors import DocumentError
from ragkv.rag import Corpus, FileOptions, FileProgress, RagIngestReport
from ragkv.retrieval import Document, ParseLimits
from tests.cli.conftest import model_folder  # noqa: F401 - a fixture
from tests.faults import raising

from . import forty_files


@pytest.fixture(scope="module")
def engine(model_folder: Path) -> Iterator[Engine]:  # noqa: F811
    with Engine.from_pretrained(model_folder, EngineConfig(store=StoreConfig())) as engine:
        yield engine


@pytest.fixture
def corpus(engine: Engine, tmp_path: Path) -> Iterator[Corpus]:
    with Corpus(engine, tmp_path / "index") as corpus:
        yield corpus


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "docs").mkdir()
    for name in ("a", "b"):
        (tmp_path / "docs" / f"{name}.txt").write_text(f"The mill {name}.")
    return tmp_path / "docs"


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the files that were parsed, in order."""
    names: list[str] = []
    real = ragkv.rag.files.load_bytes

    def noting(file: Path, *arguments: object) -> object:
        names.append(file.name)
        return real(file, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(ragkv.rag.files, "load_bytes", noting)
    return names


def ingest(corpus: Corpus, *paths: Path, **options: object) -> RagIngestReport:
    return corpus.ingest_files(paths, FileOptions(**options), encode=False)  # type: ignore[arg-type]


def statuses(report: RagIngestReport) -> dict[str, str]:
    return {Path(outcome.path).name: outcome.status for outcome in report.files}


def age(folder: Path) -> None:
    """Make files look as if they had changed long ago."""
    for file in folder.rglob("*"):
        os.utime(file, (1e9, 1e9), follow_symlinks=False)


def test_the_report_accounts_for_all_of_40_files(corpus: Corpus, tmp_path: Path) -> None:
    root = tmp_path / "forty"
    expected = forty_files.make(root)
    report = ingest(corpus, root)
    found = {str(Path(outcome.path).relative_to(root)): outcome for outcome in report.files}
    assert {name: outcome.status for name, outcome in found.items()} == expected
    for name, outcome in found.items():
        assert bool(outcome.reason) == (outcome.status in ("ignored", "failed")), name
        assert outcome.status != "failed" or Path(name).name in outcome.reason
    assert found["broken.jsonl"].documents == (f"{root / 'broken.jsonl'}/three",)
    assert "Read of it: 1 document." in found["broken.jsonl"].reason
    again = {
        str(Path(outcome.path).relative_to(root)): outcome.status
        for outcome in ingest(corpus, root).files
    }
    assert again == {
        name: "unchanged" if status == "added" else status for name, status in expected.items()
    }


def test_unchanged_files_are_neither_read_nor_parsed_again(
    corpus: Corpus, folder: Path, parsed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    age(folder)
    ingest(corpus, folder)
    read: list[Path] = []
    monkeypatch.setattr(ragkv.rag.files, "read_bytes", read.append)
    assert statuses(ingest(corpus, folder)) == {"a.txt": "unchanged", "b.txt": "unchanged"}
    assert (parsed, read) == (["a.txt", "b.txt"], [])


def test_a_file_whose_time_changed_and_whose_bytes_did_not_is_not_parsed_again(
    corpus: Corpus, folder: Path, parsed: list[str]
) -> None:
    ingest(corpus, folder)
    age(folder)
    assert set(statuses(ingest(corpus, folder)).values()) == {"unchanged"}
    assert parsed == ["a.txt", "b.txt"]


def test_a_change_of_the_same_size_in_the_same_instant_is_found(
    corpus: Corpus, folder: Path
) -> None:
    file = folder / "a.txt"
    ingest(corpus, folder)
    before = file.stat()
    file.write_text("The mill X.")
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert statuses(ingest(corpus, folder))["a.txt"] == "changed"


def test_a_file_is_parsed_again_if_its_documents_were_deleted_or_it_is_split_otherwise(
    corpus: Corpus, folder: Path, engine: Engine, tmp_path: Path, parsed: list[str]
) -> None:
    ingest(corpus, folder)
    corpus.delete(str(folder / "a.txt"))
    assert statuses(ingest(corpus, folder)) == {"a.txt": "added", "b.txt": "unchanged"}
    with Corpus(engine, tmp_path / "index", chunk_tokens=3) as other:
        assert set(statuses(ingest(other, folder)).values()) == {"changed"}
    assert parsed == ["a.txt", "b.txt", "a.txt", "a.txt", "b.txt"]


def test_documents_that_a_file_no_longer_holds_are_deleted_unless_it_has_a_bad_line(
    corpus: Corpus, tmp_path: Path
) -> None:
    file = tmp_path / "lines.jsonl"
    for name in ("one", "two"):
        forty_files.append_line(file, id=name, text=f"The {name}.")
    ingest(corpus, file)
    file.write_text('{"id": "two", "text": "The new two."}\n{\n')
    outcome = ingest(corpus, file).files[0]
    assert outcome.status == "failed" and "line 2" in outcome.reason
    assert sorted(corpus.index.contents.document_ids()) == [f"{file}/one", f"{file}/two"]
    file.write_text('{"id": "two", "text": "The two."}\n')
    report = ingest(corpus, file)
    assert (report.index.deleted, statuses(report)) == (
        (f"{file}/one",),
        {"lines.jsonl": "changed"},
    )
    assert corpus.index.contents.document_ids() == [f"{file}/two"]


def test_an_id_counts_within_its_file(corpus: Corpus, tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    for name, text in (
        ("a.jsonl", "The first."),
        ("b.jsonl", "The second."),
        ("deep/a.jsonl", "3"),
    ):
        forty_files.append_line(tmp_path / name, id="one", text=text)
    (tmp_path / "a.jsonl#one").write_text("Named like a document.")
    for _ in range(2):
        ingest(corpus, tmp_path)
        texts = {passage.text for passage in corpus.index.contents.passages()}
        assert texts == {"The first.", "The second.", "3", "Named like a document."}


def test_files_that_fail_are_logged_so_a_script_loses_none_silently(
    corpus: Corpus, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (folder / "bad.txt").write_bytes(b"\x00")
    with caplog.at_level(logging.WARNING, "ragkv.rag.files"):
        corpus.ingest(folder, encode=False)
    assert "bad.txt looks binary" in caplog.text


@pytest.mark.parametrize("data", [b"", b" \n", b"\x00", None])
def test_a_file_that_becomes_empty_or_unreadable_keeps_its_text_and_this_is_told(
    corpus: Corpus, folder: Path, monkeypatch: pytest.MonkeyPatch, data: bytes | None
) -> None:
    age(folder)
    ingest(corpus, folder)
    if data is None:
        monkeypatch.setattr(os, "access", lambda *_: False)  # as it is to others than root
        refused = DocumentError(f"Cannot read {folder / 'a.txt'}: Permission denied.")
        monkeypatch.setattr(ragkv.rag.files, "read_bytes", raising(refused))
    else:
        (folder / "a.txt").write_bytes(data)
    report = ingest(corpus, folder)
    assert statuses(report)["a.txt"] == "failed"
    assert (
        "a.txt" in report.files[0].reason
        and "What it held before stays in the index" in report.files[0].reason
    )
    assert str(folder / "a.txt") in corpus.index.contents.document_ids()


def test_what_is_lost_of_a_file_is_in_its_outcome(corpus: Corpus, folder: Path) -> None:
    (folder / "form.csv").write_text('a,b\n1,"2\n3,4\n')
    (folder / "~$plan.docx").write_bytes(b"lock")
    found = {Path(outcome.path).name: outcome for outcome in ingest(corpus, folder).files}
    assert (found["form.csv"].status, "a quote is never closed" in found["form.csv"].reason) == (
        "added",
        True,
    )
    assert (found["~$plan.docx"].status, "lock file" in found["~$plan.docx"].reason) == (
        "ignored",
        True,
    )


def test_pruning_deletes_what_is_gone_from_the_folder_and_keeps_what_fails_now(
    corpus: Corpus, folder: Path
) -> None:
    corpus.ingest([Document("other", "Not from a file.")], encode=False)
    ingest(corpus, folder)
    (folder / "a.txt").write_bytes(b"\x00")
    (folder / "b.txt").unlink()
    (folder / "c.txt").write_text("The mill c.")
    report = ingest(corpus, folder, prune=True)
    assert sorted(Path(name).name for name in corpus.index.contents.document_ids()) == [
        "a.txt",
        "c.txt",
        "other",
    ]
    assert [Path(name).name for name in report.index.deleted] == ["b.txt"]
    assert statuses(report)["b.txt"] == "deleted"


def test_files_that_are_gone_are_told_with_what_to_do(corpus: Corpus, folder: Path) -> None:
    ingest(corpus, folder)
    (folder / "a.txt").unlink()
    report = ingest(corpus, folder)
    gone = next(one for one in report.files if one.status == "gone")
    assert (Path(gone.path).name, "--prune" in gone.reason) == ("a.txt", True)
    assert str(folder / "a.txt") in corpus.index.contents.document_ids()
    assert statuses(ingest(corpus, folder, prune=True))["a.txt"] == "deleted"
    assert "a.txt" not in statuses(ingest(corpus, folder))


@pytest.mark.parametrize("new", ["moved", "a/deeper/one"])
def test_a_moved_folder_is_known_by_its_contents(corpus: Corpus, tmp_path: Path, new: str) -> None:
    old = tmp_path / "old"
    old.mkdir()
    texts = {"a.txt": "The mill a.", "b.txt": "The mill b.", "c.jsonl": '{"id": "x", "text": "c"}'}
    for name, text in texts.items():
        (old / name).write_text(text)
    corpus.ingest(old)
    entries = corpus.engine.stats().store.tiers[-1].entries
    (tmp_path / new).parent.mkdir(parents=True, exist_ok=True)
    old.rename(tmp_path / new)
    report = corpus.ingest(tmp_path / new)
    assert set(statuses(report).values()) == {"moved"}
    assert all(str(old) in outcome.reason for outcome in report.files)
    assert (report.kv.encoded, corpus.engine.stats().store.tiers[-1].entries) == (0, entries)
    assert all(str(tmp_path / new) in name for name in corpus.index.contents.document_ids())
    assert set(statuses(ingest(corpus, tmp_path / new)).values()) == {"unchanged"}


def test_a_copy_is_no_move(corpus: Corpus, folder: Path) -> None:
    ingest(corpus, folder)
    (folder / "copy.txt").write_bytes((folder / "a.txt").read_bytes())
    assert statuses(ingest(corpus, folder))["copy.txt"] == "added"
    assert len(corpus.index.contents.document_ids()) == 3


@pytest.mark.parametrize("order", [("docs", "link"), ("link", "docs")])
def test_a_link_to_a_folder_is_no_second_copy(
    corpus: Corpus, folder: Path, tmp_path: Path, order: tuple[str, str]
) -> None:
    (tmp_path / "link").symlink_to(folder)
    ingest(corpus, tmp_path / order[0])
    first = corpus.index.contents.document_ids()
    assert set(statuses(ingest(corpus, tmp_path / order[1])).values()) == {"unchanged"}
    (folder / "a.txt").write_text("The mill, changed.")
    assert statuses(ingest(corpus, tmp_path / order[1]))["a.txt"] == "changed"
    assert sorted(corpus.index.contents.document_ids()) == sorted(first)


def test_a_name_without_an_ending_is_read_if_it_is_text_and_else_ignored(
    corpus: Corpus, folder: Path
) -> None:
    (folder / "notes").write_text("Plain.")
    (folder / "program").write_bytes(b"\x7fELF\x00")
    found = statuses(ingest(corpus, folder))
    assert (found["notes"], found["program"]) == ("added", "ignored")
    assert ingest(corpus, folder / "program").files[0].status == "failed"


def test_a_file_that_is_named_from_here_is_no_link_to_itself(
    corpus: Corpus, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus.ingest(folder)
    monkeypatch.chdir(folder.parent)
    for named in (Path(folder.name), Path(folder.name), folder):
        outcomes = corpus.ingest(named).files
        assert {(one.status, one.reason) for one in outcomes} == {("unchanged", "")}


def test_links_in_a_folder_are_not_followed(corpus: Corpus, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "outside.txt").write_text("From outside.")
    (folder / "c.txt").symlink_to(tmp_path / "outside.txt")
    (folder / "d.txt").symlink_to(folder / "a.txt")
    (folder / "e.txt").symlink_to(folder / "e.txt")
    (folder / "inner").symlink_to(folder)
    assert statuses(ingest(corpus, folder / "c.txt")) == {"c.txt": "added"}, (
        "but one that is named is read"
    )
    corpus.delete(str(folder / "c.txt"))
    assert statuses(ingest(corpus, folder)) == {
        "a.txt": "added",
        "b.txt": "added",
        "c.txt": "ignored",
        "d.txt": "ignored",
        "e.txt": "failed",
        "inner": "ignored",
    }


def test_a_name_that_is_not_utf_8_fails_with_a_name_that_can_be_printed(
    corpus: Corpus, folder: Path
) -> None:
    name = os.fsdecode(b"caf\xe9.txt")
    (folder / name).write_text("text")
    failed = next(outcome for outcome in ingest(corpus, folder).files if outcome.status == "failed")
    assert failed.path.endswith("caf\\udce9.txt")
    assert "not UTF-8" in failed.reason
    failed.reason.encode()


def test_a_missing_extra_ignores_a_file_in_a_folder_and_fails_one_that_is_named(
    corpus: Corpus, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "mammoth", None)
    (folder / "plan.docx").write_bytes(b"PK")
    outcome = next(one for one in ingest(corpus, folder).files if one.path.endswith("plan.docx"))
    assert (outcome.status, 'pip install "ragkv[office]"' in outcome.reason) == ("ignored", True)
    assert ingest(corpus, folder / "plan.docx").files[0].status == "failed"


def test_a_file_above_the_limit_is_not_read_into_memory(corpus: Corpus, folder: Path) -> None:
    outcome = ingest(corpus, folder / "a.txt", limits=ParseLimits(inflated_bytes=5)).files[0]
    assert (outcome.status, "inflated_bytes" in outcome.reason) == ("failed", True)


def test_progress_counts_files(corpus: Corpus, folder: Path) -> None:
    seen: list[FileProgress] = []
    ingest(corpus, folder, on_file=seen.append)
    assert (seen[0].files, seen[-1].files, seen[-1].files_total) == (0, 2, 2)


@pytest.mark.parametrize("wrong", [3, None, ["text", 3], [Document("a", "x"), "path"], b"corpus"])
def test_ingest_takes_paths_or_documents_and_says_so_for_anything_else(
    corpus: Corpus, wrong: object
) -> None:
    with pytest.raises(TypeError, match="a path, paths or documents"):
        corpus.ingest(wrong)  # type: ignore[arg-type]


def test_ingest_takes_a_path_paths_a_document_or_documents(corpus: Corpus, folder: Path) -> None:
    for source in (str(folder), folder, [folder / "a.txt", str(folder / "b.txt")]):
        assert [
            Path(outcome.path).name for outcome in corpus.ingest(source, encode=False).files
        ] == [
            "a.txt",
            "b.txt",
        ]
    assert corpus.ingest(Document("d", "One."), encode=False).index.added == ("d",)
    assert corpus.ingest(iter([Document("e", "Two.")]), encode=False).index.added == ("e",)
    assert corpus.ingest([], encode=False).index.added == ()


def test_a_missing_path_raises(corpus: Corpus, tmp_path: Path) -> None:
    with pytest.raises(DocumentError, match="no such file"):
        corpus.ingest(tmp_path / "none")
