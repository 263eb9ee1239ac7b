"""The journal of deleted KV, and a follower's way through it. The follower's steps are called one
by one.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest

from ragkv.api.documents import deletions
from ragkv.api.documents.deletions import DeletionFollower, DeletionJournal, Position
from ragkv.store.entry import EntryKey

NAMES = {EntryKey(name.encode().hex().ljust(64, "0")): name for name in (*"abcdef", "old", "new")}


def named(*names: str) -> list[EntryKey]:
    return [key for name in names for key, known in NAMES.items() if known == name]


class Engine:
    """Records what it is asked to drop."""

    def __init__(self, is_new: bool = False) -> None:
        self.dropped: list[str] = []
        self.retained: list[str] | None = None
        self.remotes_away: tuple[str, ...] = ()
        contents = SimpleNamespace(sample=lambda count: [] if is_new else [count])
        self.parts = SimpleNamespace(store=SimpleNamespace(contents=contents))
        self.entries = self

    def delete_untold(self, keys: Sequence[EntryKey], stop: Callable[[], bool]) -> bool:
        self.dropped += (NAMES[key] for key in keys)
        return not stop()

    def retain(self, chunks: Sequence[str]) -> None:
        self.retained = list(chunks)

    def chunk(self, text: str) -> str:
        return f"chunk of {text}"

    def stats(self) -> SimpleNamespace:
        return SimpleNamespace(away=self.remotes_away)

    def take(self) -> list[str]:
        taken = self.dropped
        self.dropped = []
        return taken


class Replica:
    """A follower that runs on no thread, of a journal object of its own as in a process of
    its own.
    """

    def __init__(self, home: Path, name: str, is_new: bool = False) -> None:
        self.journal = DeletionJournal(home)
        self.engine = Engine(is_new)
        self.forgot = 0
        folder = home / name
        folder.mkdir(exist_ok=True)
        self.follower = DeletionFollower(
            self.journal, self.engine, folder, lambda: ["a text"], self._forget, list
        )  # type: ignore[arg-type]

    def _forget(self) -> None:
        self.forgot += 1

    def follow(self, times: int = 1) -> list[str]:
        for _ in range(times):
            self.follower.follow()
        return self.engine.take()


def keys(journal: DeletionJournal) -> list[str]:
    return [NAMES[note.key] for note in journal.after(Position()).notes]


def test_a_text_that_is_stored_again_is_taken_out(tmp_path: Path) -> None:
    journal = DeletionJournal(tmp_path)
    journal.remove(named("a"))  # there is no journal, and none is created
    assert journal.state() is None
    journal.add(named("a", "b"))
    journal.remove(named("b"))
    found = journal.after(Position())
    assert [NAMES[note.key] for note in found.notes] == ["a"] and found.is_complete
    journal.add(named("c"))
    assert [NAMES[note.key] for note in journal.after(found.end).notes] == ["c"]


def test_a_journal_is_bounded_and_says_what_it_does_not_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deletions, "KEPT", 3)
    journal = DeletionJournal(tmp_path)
    journal.add(named("a", "b"))
    here = journal.after(Position()).end
    journal.add(named("c", "d", "e"))
    assert keys(journal) == ["c", "d", "e"] and journal.after(here).is_complete
    assert not journal.after(Position()).is_complete
    journal.add(named("f"))
    assert not journal.after(here).is_complete


def test_a_note_of_another_replica_is_applied_at_once_and_once_more(tmp_path: Path) -> None:
    deleting = Replica(tmp_path, "deleting")
    replica = Replica(tmp_path, "replica")
    replica.follow()
    deleting.journal.add(named("a"))
    assert replica.follow() == ["a"]
    # a request may have stored it again while the text was deleted
    assert replica.follow() == ["a"]
    assert replica.follow(3) == []
    assert replica.forgot == 1


@pytest.mark.parametrize("looks", range(4))
def test_a_replica_that_is_killed_at_any_moment_follows_everything_after_its_start(
    tmp_path: Path, looks: int
) -> None:
    """It is killed after so many looks at the journal, before or after it has dropped what is
    noted.
    """
    replica = Replica(tmp_path, "replica")
    replica.follow()
    replica.journal.add(named("a"))
    replica.follow(looks)
    again = Replica(tmp_path, "replica")
    assert set(again.follow(3)) == (set() if looks > 2 else {"a"}) or looks == 2
    assert again.follow(3) == []


def test_a_replica_whose_remote_is_away_drops_here_and_again_when_it_is_back(
    tmp_path: Path,
) -> None:
    deleting = Replica(tmp_path, "deleting")
    replica = Replica(tmp_path, "replica")
    replica.follow()
    deleting.journal.add(named("a"))
    replica.engine.remotes_away = ("redis",)
    assert "a" in replica.follow(5)
    assert replica.forgot == 1
    replica.engine.remotes_away = ()
    assert replica.follow(2) == ["a", "a"]
    assert replica.follow(2) == []
    assert Replica(tmp_path, "replica").follow(3) == []


def test_a_replica_that_missed_more_than_is_kept_compares_everything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deletions, "KEPT", 2)
    deleting = Replica(tmp_path, "deleting")
    replica = Replica(tmp_path, "replica")
    replica.follow(3)
    deleting.journal.add(named("a", "b", "c", "d"))
    replica.follow()
    assert replica.engine.retained == ["chunk of a text"] and replica.forgot == 1
    replica.follow(3)
    replica.engine.retained = None
    deleting.journal.add(named("e"))
    assert replica.follow(3) == ["e", "e"] and replica.engine.retained is None


def test_a_new_replica_follows_what_is_kept_and_compares_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deletions, "KEPT", 2)
    Replica(tmp_path, "deleting").journal.add(named("a", "b", "c"))
    new = Replica(tmp_path, "empty", is_new=True)
    assert set(new.follow(3)) == {"b", "c"} and new.engine.retained is None


def test_a_home_that_was_restored_from_a_backup_is_followed_from_its_beginning(
    tmp_path: Path,
) -> None:
    deleting = Replica(tmp_path, "deleting")
    replica = Replica(tmp_path, "replica")
    deleting.journal.add(named("a"))
    backup = (tmp_path / deletions.FILE).read_bytes()
    deleting.journal.add(named("b"))
    replica.follow(4)
    (tmp_path / deletions.FILE).write_bytes(backup)
    assert set(replica.follow(4)) == {"a"}
    deleting.journal.add(named("c"))
    assert set(replica.follow(4)) == {"c"}
