"""Pending deletions: noted durably, and read again after a restart."""

import errno
from pathlib import Path

import pytest

from ragkv.cluster.pending_deletions import PendingDeletions
from ragkv.errors import StoreError
from ragkv.store import EntryKey
from tests.faults import os_error, raising


def test_pending_deletions_survive_a_restart_until_they_are_confirmed(tmp_path: Path) -> None:
    path = tmp_path / "deletions.json"
    noted = PendingDeletions(path)
    noted.add(EntryKey("a" * 64))
    noted.add(EntryKey("b" * 64))
    noted.discard(EntryKey("a" * 64))
    assert PendingDeletions(path).keys == {EntryKey("b" * 64)}


def test_a_file_of_pending_deletions_that_cannot_be_read_counts_as_empty(tmp_path: Path) -> None:
    path = tmp_path / "deletions.json"
    path.write_text("{broken")
    assert PendingDeletions(path).keys == frozenset()


def test_pending_deletions_that_cannot_be_read_now_are_not_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "deletions.json"
    PendingDeletions(path).add(EntryKey("b" * 64))
    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_text", raising(os_error(errno.EMFILE)))
        with pytest.raises(StoreError, match="cannot be read"):
            PendingDeletions(path)
    assert PendingDeletions(path).keys == {EntryKey("b" * 64)}
