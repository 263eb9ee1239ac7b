"""A file is replaced as a whole, or stays as it was."""

from pathlib import Path

import pytest

from ragkv.runtime import is_missing, replace_file
from tests.faults import raising


def test_a_replaced_file_has_the_new_content_and_is_private(tmp_path: Path) -> None:
    path = tmp_path / "file"
    for content in (b"old", b"new"):
        replace_file(path, content)
        assert path.read_bytes() == content
    assert path.stat().st_mode & 0o077 == 0
    assert list(tmp_path.iterdir()) == [path]


def test_a_failed_replacement_leaves_the_old_file_and_no_draft(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    replace_file(path, b"old")
    monkeypatch.setattr(Path, "replace", raising(OSError("no space left")))
    with pytest.raises(OSError, match="no space left"):
        replace_file(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_that_may_not_be_looked_for_is_not_taken_for_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert is_missing(tmp_path / "none") and not is_missing(tmp_path)
    monkeypatch.setattr(Path, "exists", raising(PermissionError("no")))
    assert not is_missing(tmp_path / "none")
