"""The rules of the index: it believes no row unseen, and a broken index loses only the order of use."""

import pickle
import sqlite3
from contextlib import closing
from dataclasses import astuple
from pathlib import Path
from typing import Any

import pytest

from ragkv.store import EntryKey
from ragkv.store.index import FILE, DiskIndex, Row

KEYS = {letter: EntryKey(letter * 64) for letter in "ab"}
INSERT = "INSERT INTO entries VALUES (?, ?, ?, ?, ?)"
ROW = Row(size=4096, used=12.5, group="talk", index=3)


def closing_index(directory: Path) -> closing[DiskIndex]:
    return closing(DiskIndex(directory))


def rows_of(directory: Path) -> dict[EntryKey, Row]:
    with closing_index(directory) as index:
        return dict(index.rows)


def execute(directory: Path, statement: str, *values: Any) -> None:
    connection = sqlite3.connect(directory / FILE, isolation_level=None)
    connection.execute(statement, values)
    connection.close()


def test_index_rows_survive_a_restart_and_the_last_change_of_a_row_counts(tmp_path: Path) -> None:
    index = DiskIndex(tmp_path)
    for used in range(200):
        index.record(KEYS["a"], Row(1, float(used)))
    index.record(KEYS["a"], ROW)
    index.record(KEYS["b"], ROW)
    index.record(KEYS["b"], None)
    index.close()
    assert rows_of(tmp_path) == {KEYS["a"]: ROW}


@pytest.mark.parametrize(
    "values",
    [
        ("4096", 1.0, "talk", 0),
        (4096, float("inf"), "talk", 0),
        (4096, 1.0, pickle.dumps("talk"), 0),
        (4096, 1.0, "talk", "x"),
    ],
)
def test_a_row_with_a_value_of_another_kind_is_refused_and_the_others_stay(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, values: tuple[Any, ...]
) -> None:
    with closing_index(tmp_path) as index:
        index.record(KEYS["b"], ROW)
    execute(tmp_path, "DROP TABLE entries")
    execute(tmp_path, "CREATE TABLE entries(key, size, used, conversation, member)")
    execute(tmp_path, INSERT, KEYS["a"].to_text(), *values)
    execute(tmp_path, INSERT, KEYS["b"].to_text(), *astuple(ROW))
    assert rows_of(tmp_path) == {KEYS["b"]: ROW}
    assert "is no row" in caplog.text


@pytest.mark.parametrize("text", ["../" + "a" * 61, b"a" * 64, None])
def test_a_row_whose_key_is_no_key_is_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, text: object
) -> None:
    DiskIndex(tmp_path).close()
    execute(tmp_path, "DROP TABLE entries")
    execute(tmp_path, "CREATE TABLE entries(key, size, used, conversation, member)")
    execute(tmp_path, INSERT, text, *astuple(ROW))
    assert rows_of(tmp_path) == {}
    assert "row was refused" in caplog.text


def test_the_index_of_an_earlier_version_is_deleted(tmp_path: Path) -> None:
    folder = tmp_path / "index"
    folder.mkdir()
    (folder / "cache.db").write_bytes(b"of diskcache")
    with closing_index(folder) as index:
        index.record(KEYS["a"], ROW)
    assert [file.name for file in folder.iterdir()] == [FILE]
    assert rows_of(folder) == {KEYS["a"]: ROW}


def test_the_index_is_readable_by_its_owner_alone(tmp_path: Path) -> None:
    index = DiskIndex(tmp_path / "index")
    index.record(KEYS["a"], ROW)
    folder = tmp_path / "index"
    assert {file.stat().st_mode & 0o777 for file in folder.iterdir()} == {0o600}
    assert folder.stat().st_mode & 0o777 == 0o700
    index.close()


@pytest.mark.parametrize("content", [b"", b"no database at all" * 1000])
def test_a_broken_index_is_rebuilt(tmp_path: Path, content: bytes) -> None:
    index = DiskIndex(tmp_path)
    index.record(KEYS["a"], ROW)
    index.close()
    (tmp_path / FILE).write_bytes(content)
    index = DiskIndex(tmp_path)
    assert index.rows == {}
    index.record(KEYS["b"], ROW)
    index.close()
    assert rows_of(tmp_path) == {KEYS["b"]: ROW}


def test_an_index_that_cannot_be_written_is_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    index = DiskIndex(tmp_path)
    execute(tmp_path, "DROP TABLE entries")
    for number in range(3):
        index.record(EntryKey(str(number) * 64), ROW)
    index.close()
    assert caplog.text.count("cannot be written") == 1
