"""The rules of the index: it never unpickles, and a broken index loses only the order of use."""

import pickle
import sqlite3
from pathlib import Path
from typing import Any

import diskcache
import pytest

from ragkv.errors import StoreError
from ragkv.store import EntryKey
from ragkv.store.index import DiskIndex, JsonDisk, Row

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


def execute(directory: Path, statement: str, *values: Any) -> None:
    connection = sqlite3.connect(directory / "cache.db", isolation_level=None)
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


@pytest.mark.parametrize("large", [False, True])
def test_a_pickled_value_is_refused_and_never_loaded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, large: bool
) -> None:
    DiskIndex(tmp_path).close()
    with diskcache.Cache(str(tmp_path)) as attacker:  # diskcache's own serializer: it pickles
        # a large one goes to a file
        attacker["a" * 64] = (Bomb(tmp_path / "boom"), "x" * (10**5 if large else 1))
    assert rows_of(tmp_path) == {}
    assert "pickle" in caplog.text
    assert not (tmp_path / "boom").exists()


def test_a_pickled_key_is_refused_and_the_index_rebuilt(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    DiskIndex(tmp_path / "index").close()
    insert = "INSERT INTO Cache(key, raw, store_time, mode, value) VALUES (?, 0, 0, 1, 'x')"
    execute(tmp_path / "index", insert, pickle.dumps(Bomb(tmp_path / "boom")))
    assert rows_of(tmp_path / "index") == {}
    assert "pickled key" in caplog.text
    assert not (tmp_path / "boom").exists()


@pytest.mark.parametrize(
    "value", ["no json", "[]", '{"size": "4096", "used": 1.0}', '{"size": 1, "used": NaN}', "{}"]
)
def test_a_value_that_is_not_a_row_is_left_out(tmp_path: Path, value: str) -> None:
    DiskIndex(tmp_path).close()
    with diskcache.Cache(str(tmp_path), disk=JsonDisk) as cache:
        cache["a" * 64] = value
    assert rows_of(tmp_path) == {}


def test_file_names_in_the_database_are_neither_read_nor_removed(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    disk = JsonDisk(str(tmp_path))
    disk.remove("victim")
    assert victim.exists()
    with pytest.raises(StoreError, match="refused"):
        disk.fetch(2, "victim", None, False)


@pytest.mark.parametrize(
    "write", [lambda disk: disk.put(b"x"), lambda disk: disk.store(("x",), False)]
)
def test_the_index_refuses_everything_but_text(tmp_path: Path, write: Any) -> None:
    with pytest.raises(StoreError, match="text only"):
        write(JsonDisk(str(tmp_path)))


@pytest.mark.parametrize("content", [b"", b"no database at all" * 1000])
def test_a_broken_index_is_rebuilt(tmp_path: Path, content: bytes) -> None:
    index = DiskIndex(tmp_path)
    index.record(KEYS["a"], ROW)
    index.close()
    (tmp_path / "cache.db").write_bytes(content)
    index = DiskIndex(tmp_path)
    assert index.rows == {}
    index.record(KEYS["b"], ROW)
    index.close()
    assert rows_of(tmp_path) == {KEYS["b"]: ROW}


def test_an_index_that_cannot_be_written_is_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    index = DiskIndex(tmp_path)
    execute(tmp_path, "DROP TABLE Cache")
    for number in range(3):
        index.record(EntryKey(str(number) * 64), ROW)
    index.close()
    assert caplog.text.count("cannot be written") == 1
