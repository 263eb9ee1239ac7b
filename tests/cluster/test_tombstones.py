"""Pending deletions: noted durably, and read again after a restart."""

from pathlib import Path

from ragkv.cluster.tombstones import Tombstones
from ragkv.store import EntryKey


def test_pending_deletions_survive_a_restart_until_they_are_confirmed(tmp_path: Path) -> None:
    path = tmp_path / "deletions.json"
    noted = Tombstones(path)
    noted.add(EntryKey("a" * 64))
    noted.add(EntryKey("b" * 64))
    noted.discard(EntryKey("a" * 64))
    assert Tombstones(path).keys == {EntryKey("b" * 64)}


def test_a_file_of_pending_deletions_that_cannot_be_read_counts_as_empty(tmp_path: Path) -> None:
    path = tmp_path / "deletions.json"
    path.write_text("{broken")
    assert Tombstones(path).keys == frozenset()
