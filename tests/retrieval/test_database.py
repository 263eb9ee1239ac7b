"""Looking into an index while other processes change or delete it."""

import shutil
import sqlite3
from pathlib import Path

import pytest

from ragkv.errors import StoreError
from ragkv.retrieval import Database, look_into
from ragkv.retrieval.database import FILE


def test_a_look_into_an_index_that_is_deleted_at_the_same_moment_finds_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "index"
    Database(folder).close()
    connect = Database._connect

    def deleted_first(self: Database) -> sqlite3.Connection:
        shutil.rmtree(folder)
        return connect(self)

    monkeypatch.setattr(Database, "_connect", deleted_first)
    with look_into(folder) as database:
        assert database is None
    assert not folder.exists()


def test_a_look_into_a_damaged_index_says_so(tmp_path: Path) -> None:
    (tmp_path / FILE).write_bytes(b"no database" * 100)
    with pytest.raises(StoreError, match="damaged"), look_into(tmp_path):
        pass
