"""A conversation that cannot be read now is not answered, and nothing of it is overwritten."""

import errno
import gc
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ragkv.errors import SessionUnavailableError
from ragkv.sessions import folder_storage
from ragkv.sessions.folder_storage import FolderStorage
from tests.faults import os_error, raising
from tests.scheduling.helpers import begin

from .helpers import ask, engine_at, files, is_full_prefill, talk

CODES = [errno.EMFILE, errno.EIO, errno.EACCES]


def manifest(directory: Path) -> Path:
    (path,) = (directory / "sessions").glob("*.json")
    return path


@pytest.fixture
def kept(tmp_path: Path) -> bytes:
    """The manifest of a conversation of one turn."""
    with engine_at(tmp_path) as engine:
        talk(engine, turns=1)
    return manifest(tmp_path).read_bytes()


@pytest.mark.parametrize("code", CODES)
def test_an_error_that_says_nothing_of_the_content_ends_the_request_and_changes_no_file(
    tmp_path: Path, kept: bytes, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    with engine_at(tmp_path) as engine:
        with monkeypatch.context() as patch:
            patch.setattr(Path, "read_bytes", raising(os_error(code)))
            with pytest.raises(SessionUnavailableError, match="ask again") as raised:
                engine.session("s")
        assert str(tmp_path) not in str(raised.value)
        engine.flush()
        assert manifest(tmp_path).read_bytes() == kept
        assert engine.session("s").turns == 1
        is_full_prefill(engine, engine.session("s"), 1)


def test_a_damaged_manifest_that_cannot_be_moved_aside_is_not_overwritten(
    tmp_path: Path, kept: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest(tmp_path).write_bytes(kept[:-20])
    with engine_at(tmp_path) as engine:
        with monkeypatch.context() as patch:
            patch.setattr(Path, "replace", raising(os_error(errno.EROFS)))
            with pytest.raises(SessionUnavailableError, match="cannot be moved aside"):
                engine.session("s")
        assert manifest(tmp_path).read_bytes() == kept[:-20]
        assert engine.session("s").turns == 0


def test_a_moved_manifest_is_told_of_after_a_restart_until_its_conversation_is_deleted(
    tmp_path: Path, kept: bytes
) -> None:
    manifest(tmp_path).write_bytes(kept[:-20])
    with engine_at(tmp_path) as engine:
        engine.session("s")
    with engine_at(tmp_path) as engine:
        session = engine.session("s", ttl_s=60)
        (note,) = ask(engine, session, 0).reuse.notes
        assert "moved aside" in note
        engine.flush()
        (aside,) = (tmp_path / "sessions").glob("*.damaged")
        assert aside.read_bytes() == kept[:-20]
        session.delete()
        assert not list((tmp_path / "sessions").iterdir())
        assert ask(engine, engine.session("s"), 0).reuse.notes == ()


@pytest.mark.usefixtures("kept")
def test_a_deletion_needs_no_manifest_that_can_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with engine_at(tmp_path) as engine:
        talk(engine, "other", turns=1).reset()
        with monkeypatch.context() as patch:
            patch.setattr(Path, "read_bytes", raising(os_error(errno.EACCES)))
            engine.sessions.delete_all(["s", "other"])
        engine.flush()
        assert not list((tmp_path / "sessions").iterdir()) and files(tmp_path) == 0


@pytest.mark.usefixtures("kept")
def test_a_summary_that_cannot_be_read_leaves_the_blocks_and_is_listed_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = files(tmp_path)
    real = Path.open

    def fails(self: Path, *arguments: Any, **how: Any) -> Any:
        if self.parent.name == "sessions":
            raise os_error(errno.EMFILE)
        return real(self, *arguments, **how)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", fails)
        engine = engine_at(tmp_path)
        engine.sessions.begin()
    with engine:
        engine.flush()
        assert engine.sessions.ids() == () and files(tmp_path) == before
        assert engine.session("s").turns == 1
        assert engine.sessions.ids() == ("s",)


@pytest.mark.usefixtures("kept")
def test_a_turn_waits_for_no_manifest_of_another_conversation_and_each_is_read_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reading, go_on = threading.Event(), threading.Event()
    real: Callable[..., Any] = FolderStorage.load
    loads = []

    def slow(self: FolderStorage, session_id: str, known: str | None) -> Any:
        loads.append(session_id)
        found = real(self, session_id, known)
        if session_id == "s":
            reading.set()
            assert go_on.wait(60)
        return found

    with engine_at(tmp_path) as engine:
        other = engine.session("other")
        monkeypatch.setattr(FolderStorage, "load", slow)
        found: list[Any] = []
        threads = [begin(lambda: found.append(engine.session("s"))) for _ in range(2)]
        assert reading.wait(60)
        answering = begin(lambda: ask(engine, other, 0))
        answering.join(60)
        assert not answering.is_alive() and other.turns == 1
        go_on.set()
        for thread in threads:
            thread.join(60)
        assert found[0] is found[1] and loads == ["s"]


@pytest.mark.parametrize("how", ["delete", "reset", "delete_all"])
def test_a_session_whose_manifest_cannot_be_deleted_is_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    with engine_at(tmp_path) as engine:
        session = talk(engine, turns=2)
        engine.flush()
        end = getattr(session, how, lambda: engine.sessions.delete_all(["s"]))
        with monkeypatch.context() as patch:
            patch.setattr(folder_storage, "_remove", raising(os_error(errno.EROFS)))
            with pytest.raises(SessionUnavailableError, match="cannot be deleted") as raised:
                end()
        assert str(tmp_path) not in str(raised.value)
        assert (session.turns, engine.sessions.ids()) == (2, ("s",))
        is_full_prefill(engine, session, 2)
    with engine_at(tmp_path) as engine:
        session = engine.session("s")
        assert session.turns == 2
        getattr(session, how, lambda: engine.sessions.delete_all(["s"]))()
        assert engine.sessions.ids() == ()


@pytest.mark.parametrize("on_disk", [True, False])
def test_nobody_keeps_a_session_that_has_no_turn(tmp_path: Path, on_disk: bool) -> None:
    with engine_at(tmp_path if on_disk else None) as engine:
        engine.session("new", ttl_s=60)
        talk(engine, "rewound", turns=1).rewind()
        engine.flush()
        gc.collect()
        assert not list(engine.sessions.storage.summaries())
        assert engine.sessions.live("new") is None and engine.sessions.live("rewound") is None
