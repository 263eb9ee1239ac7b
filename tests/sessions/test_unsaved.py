"""Unsaved sessions: they are in one process alone, share the blocks of the session they continue,
and leave none.
"""

from pathlib import Path
from typing import Any

import pytest

from ragkv import Engine
from ragkv.config import RedisConfig
from ragkv.prompt.history import BlockWriter
from ragkv.sessions.history_blocks import HistoryBlocks
from tests.cluster.helpers import unique_prefix
from tests.cluster.servers import RedisServer

from .helpers import ask, engine_at, files, is_full_prefill

pytestmark = pytest.mark.enable_socket


def test_an_unsaved_session_is_listed_nowhere_and_leaves_no_file(
    engine: Engine, tmp_path: Path
) -> None:
    session = engine.sessions.unsaved("copy")
    ask(engine, session, 0)
    is_full_prefill(engine, session, 1)
    engine.flush()
    assert (
        engine.sessions.ids() == ()
        and not list(tmp_path.glob("sessions/*"))
        and files(tmp_path) > 0
    )
    session.delete()
    engine.flush()
    assert files(tmp_path) == 0


def test_a_fork_of_an_unsaved_session_is_saved_with_its_blocks(
    engine: Engine, tmp_path: Path
) -> None:
    session = engine.sessions.unsaved("copy")
    ask(engine, session, 0)
    session.fork("saved")
    session.delete()
    engine.flush()
    assert engine.sessions.ids() == ("saved",) and files(tmp_path) > 0
    assert is_full_prefill(engine, engine.session("saved"), 1).reuse.exact > 1


def test_deleting_an_unsaved_copy_leaves_the_blocks_of_the_session_it_continued(
    engine: Engine, tmp_path: Path
) -> None:
    ask(engine, engine.session("saved"), 0)
    engine.flush()
    before = files(tmp_path)
    copy = engine.sessions.unsaved("copy", engine.session("saved"), ("a note",))
    assert "a note" in ask(engine, copy, 1).reuse.notes
    copy.delete()
    engine.flush()
    assert files(tmp_path) == before
    assert engine.session("saved").turns == 1


def test_the_end_of_an_unsaved_session_reads_what_all_sessions_have_on_the_writers_thread(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A chat turn without a session's id ends so, before its last event is sent."""
    session = engine.sessions.unsaved("copy")
    ask(engine, session, 0)
    engine.flush()
    on_writer: list[bool] = []
    used_keys = HistoryBlocks._used

    def used(self: HistoryBlocks) -> Any:
        on_writer.append(self.writer.worker.is_current)
        return used_keys(self)

    monkeypatch.setattr(HistoryBlocks, "_used", used)
    session.delete()
    engine.flush()
    assert on_writer == [True] and files(tmp_path) == 0


def test_blocks_that_the_writer_cannot_delete_later_are_deleted_with_the_next_ones(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    session = engine.sessions.unsaved("copy")
    ask(engine, session, 0)
    engine.flush()
    with monkeypatch.context() as patch:
        patch.setattr(BlockWriter, "then", lambda *_: False)
        session.delete()
    assert files(tmp_path) > 0
    engine.sessions.blocks.delete_unused()
    assert files(tmp_path) == 0


def test_a_session_deleted_by_another_replica_leaves_the_blocks_of_an_unsaved_copy_here(
    tmp_path: Path, redis_server: RedisServer
) -> None:
    config = RedisConfig(url=redis_server.url, prefix=unique_prefix(), timeout_s=10.0)
    with (
        engine_at(tmp_path / "a", session={"shared": True}, redis=config) as here,
        engine_at(tmp_path / "b", session={"shared": True}, redis=config) as there,
    ):
        ask(here, here.session("saved"), 0)
        copy = here.sessions.unsaved("copy", here.session("saved"))
        there.session("saved").delete()
        here.sessions._deletions._follow_deletions()  # type: ignore[attr-defined]
        assert is_full_prefill(here, copy, 1).reuse.exact > 1
        copy.delete()
