"""What becomes of files that are moved, linked, equal or gone: the index has each under a name that
is there, and tells of those that are not.
"""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from ragkv.rag.files import FileOptions, FileReader
from ragkv.retrieval import Index
from tests.retrieval.fakes import word_splitter

TEXTS = {
    "ada.md": "Ada mends clocks.",
    "tern.md": "The Tern sails.",
    "sub/kiln.md": "A kiln of lime.",
}


class Folders:
    """A folder, and an index that reads it."""

    def __init__(self, root: Path, index: Index) -> None:
        self.root = root
        self._index = index
        for name, text in TEXTS.items():
            self.write(f"old/{name}", text)

    def write(self, name: str, text: str) -> None:
        (self.root / name).parent.mkdir(parents=True, exist_ok=True)
        (self.root / name).write_text(text)

    def ingest(self, *names: str, prune: bool = False) -> dict[str, str]:
        """The outcome of each file."""
        reader = FileReader(self._index, lambda _: 0, FileOptions(prune=prune), "m")
        reader.run([self.root / name for name in names])
        self.reasons = [one.reason for one in reader.outcomes]
        return {os.path.relpath(one.path, self.root): one.status for one in reader.outcomes}

    @property
    def documents(self) -> list[str]:
        return sorted(
            os.path.relpath(name, self.root) for name in self._index.contents.document_ids()
        )


@pytest.fixture
def folders(tmp_path: Path) -> Iterator[Folders]:
    with Index(None, word_splitter()) as index:
        yield Folders(tmp_path, index)


def test_two_files_with_one_text_that_are_moved_are_both_known(folders: Folders) -> None:
    folders.write("old/twin.md", TEXTS["ada.md"])
    folders.ingest("old")
    (folders.root / "old").rename(folders.root / "new")
    assert set(folders.ingest("new").values()) == {"moved"}
    assert folders.documents == ["new/ada.md", "new/sub/kiln.md", "new/tern.md", "new/twin.md"]
    assert any("old/twin.md" in reason for reason in folders.reasons)


def test_what_was_changed_in_a_moved_folder_is_told_under_its_old_name(folders: Folders) -> None:
    folders.ingest("old")
    (folders.root / "old").rename(folders.root / "new")
    folders.write("new/tern.md", "The Tern is at home.")
    found = folders.ingest("new")
    assert found == {"new/ada.md": "moved", "new/sub/kiln.md": "moved", "new/tern.md": "added",
                     "old/tern.md": "gone"}  # fmt: skip
    assert "name its folder, too" in folders.reasons[-1]
    assert "old/tern.md" not in folders.ingest("new", prune=True)  # it was not named
    assert folders.ingest("old", "new", prune=True)["old/tern.md"] == "deleted"
    assert folders.documents == ["new/ada.md", "new/sub/kiln.md", "new/tern.md"]


@pytest.mark.parametrize("named", ["old", "old/sub", "old/sub/kiln.md"])
def test_a_name_of_what_is_gone_tells_it_and_prunes_it(folders: Folders, named: str) -> None:
    folders.ingest("old")
    shutil.rmtree(folders.root / "old")
    assert set(folders.ingest(named).values()) == {"gone"}
    assert len(folders.documents) == 3
    deleted = folders.ingest(named, prune=True)
    assert set(deleted.values()) == {"deleted"} and len(folders.documents) == 3 - len(deleted)


def test_a_name_that_never_was_is_no_such_file(folders: Folders) -> None:
    folders.ingest("old")
    assert folders.ingest("oldest", "old", prune=True)["oldest"] == "failed"
    assert len(folders.documents) == 3


@pytest.mark.parametrize(("first", "then"), [("link", "old"), ("old", "link")])
def test_what_is_gone_behind_a_link_is_pruned_under_both_names(
    folders: Folders, first: str, then: str
) -> None:
    (folders.root / "link").symlink_to(folders.root / "old")
    folders.ingest(first)
    (folders.root / "old/ada.md").unlink()
    assert folders.ingest(then)[f"{first}/ada.md"] == "gone"
    assert folders.ingest(then, prune=True)[f"{first}/ada.md"] == "deleted"
    assert folders.documents == [f"{first}/sub/kiln.md", f"{first}/tern.md"]


def test_a_folder_that_may_not_be_read_is_not_gone(
    folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders.ingest("old")
    real = os.lstat
    hidden = str(folders.root / "old/sub")

    def lstat(path: str | Path, **how: int) -> os.stat_result:
        if str(path).startswith(f"{hidden}/"):
            raise PermissionError(13, "Permission denied")
        return real(path, **how)

    (folders.root / "old/sub").rename(folders.root / "away")
    monkeypatch.setattr("os.lstat", lstat)
    assert "deleted" not in folders.ingest("old", prune=True).values()
    assert "old/sub/kiln.md" in folders.documents
