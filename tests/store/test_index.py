"""The rules of the index: a broken index loses only the order of use."""

import sqlite3
from pathlib import Path
from typing import Any

import pytest

from ragkv.store import EntryKey
from ragkv.store.index import DiskIndex, Row

KEYS = {letter: EntryKey(letter * 64) for letter in "ab"}
ROW = Row(size=4096, used=12.5, group="talk", index=3)


def rows_of(directory: Path) -> dict[EntryKey, Row]:
    index = DiskIndex(directory)
    index.close()
    return dict(index.rows)


def execute(directory: Path, statement: str, *values: Any) -> None:
    connection = sqlite3.connect(directory / "rows.db", isolation_level=None)
    connection.execute(statement, values)
    connection.close()


def test_index_rows_survive_a_restart_and_the_last_change_of_a_row_counts(tmp_path: Path) -> None:
    index = DiskIndex(tmp_path / "index")
    for used in range(200):
        index.record(KEYS["a"], Row(1, float(used)))
    index.record(KEYS["a"], ROW)
    index.record(KEYS["b"], ROW)
    index.record(KEYS["b"], None)
    index.close()
    assert rows_of(tmp_path / "index") == {KEYS["a"]: ROW}


@pytest.mark.parametrize(
    "values",
    [("a" * 63, 1, 1.0, "", 0), ("a" * 64, "many", 1.0, "", 0), ("a" * 64, 1, None, "", 0), ("a" * 64, 1, 1.0, b"", 0)],
)
def test_a_row_that_is_none_is_left_out(tmp_path: Path, values: tuple[Any, ...]) -> None:
    DiskIndex(tmp_path / "index").close()
    execute(tmp_path / "index", "INSERT INTO rows VALUES (?, ?, ?, ?, ?)", *values)
    assert rows_of(tmp_path / "index") == {}


@pytest.mark.parametrize("content", [b"", b"no database at all" * 1000])
def test_a_broken_index_is_rebuilt(tmp_path: Path, content: bytes) -> None:
    index = DiskIndex(tmp_path / "index")
    index.record(KEYS["a"], ROW)
    index.close()
    (tmp_path / "index" / "rows.db").write_bytes(content)
    index = DiskIndex(tmp_path / "index")
    assert index.rows == {}
    index.record(KEYS["b"], ROW)
    index.close()
    assert rows_of(tmp_path / "index") == {KEYS["b"]: ROW}


def test_an_index_of_an_earlier_form_is_removed(tmp_path: Path) -> None:
    (tmp_path / "cache.db").write_bytes(b"")
    assert rows_of(tmp_path) == {}
    assert not (tmp_path / "cache.db").exists()


def test_an_index_that_cannot_be_written_is_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    index = DiskIndex(tmp_path / "index")
    execute(tmp_path / "index", "DROP TABLE rows")
    for number in range(3):
        index.record(EntryKey(str(number) * 64), ROW)
    index.close()
    assert caplog.text.count("cannot be written") == 1
