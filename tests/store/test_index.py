"""The rules of the index: it never unpickles, and a broken index loses only the order of use."""

import contextlib
import json
import pickle
import sqlite3
from dataclasses import asdict
from pathlib import Path

import pytest

from ragkv.store import EntryKey
from ragkv.store.index import DiskIndex, Row

KEYS = {letter: EntryKey(letter * 64) for letter in "ab"}
ROW = Row(size=4096, used=12.5, group="talk", index=3)


class Bomb:
    """Unpickling it leaves a file behind."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> object:
        return Path.touch, (self.path,)


def rows_of(directory: Path) -> dict[EntryKey, Row]:
    index = DiskIndex(directory)
    index.close()
    return dict(index.rows)


def test_index_rows_survive_a_restart(tmp_path: Path) -> None:
    index = DiskIndex(tmp_path / "index")
    index.record(KEYS["a"], ROW)
    index.record(KEYS["b"], ROW)
    index.record(KEYS["b"], None)
    index.close()
    assert rows_of(tmp_path / "index") == {KEYS["a"]: ROW}


def test_the_last_change_of_a_row_is_stored(tmp_path: Path) -> None:
    index = DiskIndex(tmp_path / "index")
    for used in range(200):
        index.record(KEYS["a"], Row(1, float(used)))
    index.close()
    assert rows_of(tmp_path / "index") == {KEYS["a"]: Row(1, 199.0)}


def earlier(directory: Path, key: object, value: object) -> None:
    """An index as versions with diskcache left it, with one row."""
    directory.mkdir(mode=0o700)
    with contextlib.closing(sqlite3.connect(directory / "cache.db")) as connection, connection:
        connection.execute("CREATE TABLE Cache (rowid INTEGER PRIMARY KEY, key BLOB, raw INTEGER, value BLOB)")
        connection.execute("INSERT INTO Cache (key, raw, value) VALUES (?, 1, ?)", (key, value))


def test_the_rows_of_an_earlier_version_are_taken_over_once(tmp_path: Path) -> None:
    earlier(tmp_path / "index", "a" * 64, json.dumps(asdict(ROW)))
    assert rows_of(tmp_path / "index") == {KEYS["a"]: ROW}
    assert not (tmp_path / "index" / "cache.db").exists()
    assert rows_of(tmp_path / "index") == {KEYS["a"]: ROW}


@pytest.mark.parametrize("where", ["key", "value"])
def test_what_was_pickled_is_never_loaded(tmp_path: Path, where: str) -> None:
    bomb = pickle.dumps(Bomb(tmp_path / "boom"))
    earlier(tmp_path / "index", bomb if where == "key" else "a" * 64, "{}" if where == "key" else bomb)
    assert rows_of(tmp_path / "index") == {}
    assert not (tmp_path / "boom").exists()


@pytest.mark.parametrize("value", ["no json", "[]", '{"size": "4096", "used": 1.0}', '{"size": 1, "used": NaN}', "{}"])
def test_a_value_that_is_not_a_row_is_left_out(tmp_path: Path, value: str) -> None:
    DiskIndex(tmp_path / "index").close()
    with contextlib.closing(sqlite3.connect(tmp_path / "index" / "rows.db")) as connection, connection:
        connection.execute("INSERT INTO rows VALUES (?, ?)", ("a" * 64, value))
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


def test_an_index_that_cannot_be_written_is_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    index = DiskIndex(tmp_path / "index")
    with sqlite3.connect(tmp_path / "index" / "rows.db", isolation_level=None) as connection:
        connection.execute("DROP TABLE rows")
    connection.close()
    for number in range(3):
        index.record(EntryKey(str(number) * 64), ROW)
    index.close()
    assert caplog.text.count("cannot be written") == 1
