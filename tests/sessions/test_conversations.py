"""A conversation can be forked, rewound, listed, deleted and left alone until it expires."""

import gc
import json
import threading
from pathlib import Path
from typing import Any

import pytest

from ragkv import Engine
from ragkv.errors import InputError, RagKVError
from tests.engine.helpers import A, B

from .helpers import ask, engine_at, files, is_full_prefill, pinned, question, with_kv


def talk(engine: Engine, session_id: str = "s", turns: int = 3) -> Any:
    session = engine.session(session_id)
    for turn in range(session.turns, turns):
        ask(engine, session, turn)
    return session


class Clock:
    """A clock that is set by hand."""

    def __init__(self, engine: Engine) -> None:
        self.now = 1000.0
        engine._sessions.clock = lambda: self.now
        engine._sessions._swept_at = 0.0


class TestFork:
    def test_shares_the_past_and_its_blocks_and_goes_its_own_way(self, tmp_path: Path) -> None:
        with engine_at(tmp_path) as engine:
            session = talk(engine)
            engine.flush()
            before = files(tmp_path)
            other = session.fork("other")
            engine.flush()
            assert files(tmp_path) == before
            assert (other.token_ids, other.turns) == (session.token_ids, 3)
            ask(engine, other, 7)
            assert session.turns == 3
            assert is_full_prefill(engine, session, 3, ratio=0.0).reuse.exact == 1 + with_kv(session)
            assert is_full_prefill(engine, other, 4, ratio=0.0).reuse.exact == 1 + with_kv(other)
        with engine_at(tmp_path) as engine:
            assert engine.session("other").turns == 4
            assert is_full_prefill(engine, engine.session("other"), 4).reuse.notes == ()

    def test_of_a_past_that_is_not_exact_shares_it_as_it_is(self, tmp_path: Path) -> None:
        with engine_at(tmp_path) as engine:
            engine.warm([A, B])
            session = talk(engine, turns=1)
            engine.answer(question(1), [A, B], session, ratio=0.0, max_new_tokens=4, min_new_tokens=4)
            other = session.fork("other")
            one, two = (engine.prefill(question(2), session=each, ratio=0.0) for each in (session, other))
            assert one.reuse.fused == two.reuse.fused > 0
            assert one.logits.equal(two.logits)

    def test_the_original_may_be_deleted(self, tmp_path: Path) -> None:
        with engine_at(tmp_path) as engine:
            session = talk(engine)
            other = session.fork("other")
            session.delete()
            assert is_full_prefill(engine, other, 3, ratio=0.0).reuse.exact == 1 + with_kv(other)
            other.delete()
            engine.flush()
            assert files(tmp_path) == 0

    def test_over_another_conversation_is_refused(self) -> None:
        with engine_at(None) as engine:
            session, _ = talk(engine, "s"), talk(engine, "other", turns=1)
            for taken in ("other", "s"):
                with pytest.raises(InputError, match="conversation"):
                    session.fork(taken)


class TestRewind:
    def test_regenerates_without_computing_the_past(self, tmp_path: Path) -> None:
        with engine_at(tmp_path) as engine:
            session = talk(engine)
            history = session.token_ids[: 2 * 9]
            session.rewind()
            assert (session.token_ids, session.turns) == (history, 2)
            assert is_full_prefill(engine, session, 2, ratio=0.0).reuse.exact == 1 + with_kv(session)
            again = engine.answer(question(2), session=session, max_new_tokens=4, do_sample=True, seed=3)
            assert session.token_ids == (*history, *question(2), *again.token_ids)

    def test_edits_a_past_turn_and_drops_what_came_after(self, tmp_path: Path) -> None:
        with engine_at(tmp_path) as engine:
            session = talk(engine, turns=4)
            session.rewind(3)
            engine.flush()
            assert files(tmp_path) == len(session.conversation.history.blocks)
            ask(engine, session, 9)
            is_full_prefill(engine, session, 2)
        with engine_at(tmp_path) as engine:
            assert engine.session("s").turns == 2

    @pytest.mark.parametrize("turns", [0, 4, -1])
    def test_of_turns_there_are_not_is_refused(self, turns: int) -> None:
        with engine_at(None) as engine, pytest.raises(InputError, match="has 3"):
            talk(engine).rewind(turns)


class TestDelete:
    def test_leaves_nothing(self, tmp_path: Path) -> None:
        with engine_at(tmp_path) as engine:
            talk(engine, "a"), talk(engine, "b", turns=1)
            engine.flush()
            engine.delete_session("a")
            engine.flush()
            assert [info.session_id for info in engine.sessions()] == ["b"]
            assert files(tmp_path) == len(engine.session("b").conversation.history.blocks)
            engine.delete_session("b")
            engine.delete_session("never")
            assert files(tmp_path) == len(list((tmp_path / "sessions").iterdir())) == 0
            assert engine.stats().store.tiers[0].entries == 0

    def test_ends_the_object_and_the_id_is_free_again(self) -> None:
        with engine_at(None) as engine:
            session = talk(engine)
            session.delete()
            with pytest.raises(InputError, match="deleted"):
                ask(engine, session, 3)
            assert engine.session("s").turns == 0

    def test_reset_forgets_every_turn_and_the_session_goes_on(self, tmp_path: Path) -> None:
        with engine_at(tmp_path) as engine:
            session = talk(engine)
            engine.flush()
            session.reset()
            assert (session.token_ids, session.turns, files(tmp_path)) == ((), 0, 0)
            assert talk(engine, turns=1) is session
        with engine_at(tmp_path) as engine:
            assert engine.session("s").turns == 1

    def test_deleting_chunks_and_sweeping_leave_conversations_alone(self, tmp_path: Path) -> None:
        with engine_at(tmp_path) as engine:
            engine.warm([A, B])
            session = engine.session("s")
            engine.answer(question(0), [A, B], session, max_new_tokens=4, min_new_tokens=4)
            engine.flush()
            blocks = len(session.conversation.history.blocks)
            engine.delete([A])
            assert engine.retain([]) == 1
            assert engine.gc() == 0
            assert files(tmp_path) == blocks
            assert engine.prefill(question(1), session=session).reuse.notes == ()


def test_sessions_are_listed_with_what_they_hold(tmp_path: Path) -> None:
    with engine_at(tmp_path) as engine:
        clock = Clock(engine)
        one = talk(engine, "1")
        clock.now += 5
        talk(engine, "2", turns=1)
        engine.session("empty")
        engine.flush()
        second, first = engine.sessions()
        assert (first.session_id, first.turns, first.tokens, first.used_at) == ("1", 3, 27, 1000.0)
        assert first.stored_bytes == with_kv(one) * engine.stats().kv_bytes_per_token
        assert (second.session_id, second.used_at) == ("2", 1005.0)
    with engine_at(tmp_path) as engine:
        assert {info.session_id for info in engine.sessions()} == {"1", "2"}
        assert engine.sessions()[1] == first


class TestTtl:
    def test_an_idle_conversation_is_gone_when_asked_for(self, tmp_path: Path) -> None:
        with engine_at(tmp_path, session=dict(ttl_s=10.0)) as engine:
            clock = Clock(engine)
            session = talk(engine)
            engine.flush()
            clock.now += 9
            ask(engine, session, 3)
            clock.now += 9  # since its last turn, not since its first
            assert engine.session("s").turns == 4
            clock.now += 2
            assert engine.session("s") is session
            assert session.turns == 0
            assert files(tmp_path) == 0

    def test_its_own_goes_before_the_setting_and_outlives_a_restart(self, tmp_path: Path) -> None:
        with engine_at(tmp_path) as engine:
            engine.session("short", ttl_s=1e-3)
            talk(engine, "short")
            talk(engine, "long")
        with engine_at(tmp_path) as engine:
            assert [info.session_id for info in engine.sessions()] == ["long"]
            assert files(tmp_path) == len(engine.session("long").conversation.history.blocks)

    def test_a_turn_of_another_session_sweeps(self, tmp_path: Path) -> None:
        with engine_at(tmp_path, session=dict(ttl_s=10.0)) as engine:
            clock = Clock(engine)
            talk(engine, "idle")
            clock.now += 11
            talk(engine, "busy", turns=1)
            engine.flush()
            assert [info.session_id for info in engine.sessions()] == ["busy"]
            assert files(tmp_path) == 1 == len(list((tmp_path / "sessions").iterdir()))

    def test_never_while_a_turn_runs(self, tmp_path: Path) -> None:
        with engine_at(tmp_path, session=dict(ttl_s=10.0)) as engine:
            clock = Clock(engine)
            session = talk(engine)
            stream = engine.stream(question(3), session=session, max_new_tokens=4, min_new_tokens=4)
            next(stream)
            clock.now += 100
            engine.session("s")
            engine._sessions._sweep()
            assert session.turns == 3
            list(stream)
            assert session.turns == 4
            is_full_prefill(engine, session, 4)

    @pytest.mark.parametrize("ttl_s", [0, -1.0])
    def test_must_be_positive(self, ttl_s: float) -> None:
        with engine_at(None) as engine, pytest.raises(InputError, match="ttl_s"):
            engine.session("s", ttl_s=ttl_s)


class TestOneSessionAtATime:
    def test_a_second_stream_on_the_same_thread_is_refused_not_waited_for(self) -> None:
        with engine_at(None) as engine:
            session = talk(engine, turns=1)
            stream = engine.stream(question(1), session=session, max_new_tokens=4, min_new_tokens=4)
            next(stream)
            for action in (lambda: ask(engine, session, 2), session.reset, session.rewind, session.delete):
                with pytest.raises(InputError, match="under way on this thread"):
                    action()
            engine.prefill(question(2), session=session)  # reads the session as it was
            list(stream)
            assert session.turns == 2

    def test_two_threads_take_turns(self, tmp_path: Path) -> None:
        with engine_at(tmp_path) as engine:
            session = engine.session("s")
            threads = [threading.Thread(target=ask, args=(engine, session, turn)) for turn in range(6)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert session.turns == 6
            assert is_full_prefill(engine, session, 6, ratio=0.0).reuse.exact == 1 + with_kv(session)
            assert pinned(engine) == 0

    def test_an_id_names_one_object_while_it_lives(self, tmp_path: Path) -> None:
        with engine_at(tmp_path) as engine:
            session = talk(engine)
            assert engine.session("s") is session
            engine.flush()
            del session
            gc.collect()
            assert "s" not in engine._sessions._live  # what is written down need not stay in memory
            assert engine.session("s").turns == 3
        with engine_at(None) as engine:
            talk(engine)
            gc.collect()
            assert engine.session("s").turns == 3

    @pytest.mark.parametrize("wrong", ["", None, 3])
    def test_an_id_is_a_string(self, wrong: Any) -> None:
        with engine_at(None) as engine, pytest.raises(InputError, match="id must be a string"):
            engine.session(wrong)


def test_a_closed_engine_opens_no_session(tmp_path: Path) -> None:
    engine = engine_at(tmp_path)
    engine.close()
    with pytest.raises(RagKVError, match="closed"):
        engine.session("s")


def test_a_read_only_store_keeps_sessions_in_memory(tmp_path: Path) -> None:
    with engine_at(tmp_path) as engine:
        talk(engine)
    before = sorted(path.name for path in tmp_path.rglob("*"))
    with engine_at(tmp_path, read_only=True) as engine:
        session = talk(engine, turns=2)
        assert is_full_prefill(engine, session, 2, ratio=0.0).reuse.exact == 1 + with_kv(session)
        session.rewind()
        session.delete()
    assert sorted(path.name for path in tmp_path.rglob("*")) == before


def test_nobody_else_can_read_a_manifest_and_it_names_no_one(tmp_path: Path) -> None:
    with engine_at(tmp_path) as engine:
        talk(engine, "alice@example.org")
    (manifest,) = (tmp_path / "sessions").iterdir()
    assert (manifest.stat().st_mode & 0o777, manifest.parent.stat().st_mode & 0o777) == (0o600, 0o700)
    assert "alice" not in manifest.name
    head, summary, _ = map(json.loads, manifest.read_text().splitlines())
    assert head["version"] == 1
    assert summary["session_id"] == "alice@example.org"


def test_many_turns_fill_a_manifest_in_proportion(tmp_path: Path) -> None:
    """What turns share is written once: twice the turns, about twice the bytes."""
    sizes = []
    with engine_at(tmp_path) as engine:
        session = engine.session("s")
        for turn in range(40):
            engine.append(session, question(turn), question(turn + 50)[:4])
            if turn in (19, 39):
                engine.flush()
                sizes.append(next((tmp_path / "sessions").iterdir()).stat().st_size)
        before = session.conversation
    assert sizes[1] < 2.2 * sizes[0]
    with engine_at(tmp_path) as engine:
        assert engine.session("s").conversation == before
