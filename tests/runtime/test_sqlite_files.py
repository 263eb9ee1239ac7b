"""SQLite files are made and watched without losing the locks under which SQLite writes them."""

import os
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from ragkv.api.documents.deletions import FILE, DeletionJournal
from ragkv.retrieval import Index, index_state
from ragkv.retrieval.index_schema import FILE as INDEX
from ragkv.runtime import sqlite_files
from ragkv.store.entry import EntryKey

WRITE = (
    "import sqlite3, sys; sqlite3.connect(sys.argv[1], timeout=0, "
    "isolation_level=None).execute('BEGIN IMMEDIATE')"
)


def another_process_may_write(file: Path) -> bool:
    done = subprocess.run(
        [sys.executable, "-c", WRITE, str(file)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0 or "database is locked" in done.stderr, done.stderr
    return done.returncode == 0


def look_at_journal(folder: Path) -> None:
    DeletionJournal(folder).state()


def open_index(folder: Path) -> None:
    Index(folder).close()


@pytest.mark.parametrize(
    ("name", "look"), [(FILE, look_at_journal), (INDEX, index_state), (INDEX, open_index)]
)
def test_looking_at_a_file_leaves_it_locked(
    tmp_path: Path, name: str, look: Callable[[Path], object]
) -> None:
    DeletionJournal(tmp_path).add([EntryKey("a" * 64)])
    Index(tmp_path).close()
    with closing(sqlite3.connect(tmp_path / name, isolation_level=None)) as connection:
        assert another_process_may_write(tmp_path / name)
        connection.execute("BEGIN IMMEDIATE")
        look(tmp_path)
        assert not another_process_may_write(tmp_path / name)


def test_every_transaction_changes_the_state_of_a_file(tmp_path: Path) -> None:
    journal = DeletionJournal(tmp_path)
    assert journal.state() is None
    states = []
    for key in "abc":
        journal.add([EntryKey(key * 64)])
        states.append(journal.state())
    assert (
        len({id(state) for state in states}) == 3
        and states[0] != states[1] != states[2] != states[0]
    )
    assert len({state.inode for state in states if state is not None}) == 1


def test_the_state_of_a_file_that_does_not_change_settles(tmp_path: Path) -> None:
    journal = DeletionJournal(tmp_path)
    journal.add([EntryKey("a" * 64)])
    assert journal.state() != journal.state()  # too soon after the change
    os.utime(tmp_path / FILE, (1e9, 1e9))
    assert journal.state() == journal.state()


def test_a_new_file_is_its_owners_alone_and_an_old_one_stays(tmp_path: Path) -> None:
    file = tmp_path / "folder" / "x.sqlite"
    before = os.umask(0)
    try:
        sqlite_files.create_private(file)
    finally:
        os.umask(before)
    assert file.stat().st_mode & 0o777 == 0o600 and file.parent.stat().st_mode & 0o777 == 0o700
    file.write_bytes(b"x")
    sqlite_files.create_private(file)
    assert file.read_bytes() == b"x" and [path.name for path in file.parent.iterdir()] == [
        "x.sqlite"
    ]
