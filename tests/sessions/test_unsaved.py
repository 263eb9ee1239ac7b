"""Unsaved sessions: they are in one process alone, share the blocks of the session they continue,
and leave none.
"""

from pathlib import Path

import pytest

from ragkv import Engine
from ragkv.config import RedisConfig
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
