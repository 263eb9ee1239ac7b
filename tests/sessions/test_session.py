"""A conversation can be forked, rewound, listed and deleted, and expires when it is idle."""

import gc
import json
import weakref
from pathlib import Path
from typing import Any

import pytest

from ragkv import Engine
from ragkv.errors import CancelledError, InputError, SessionUnavailableError
from ragkv.sessions.folder_storage import FolderStorage
from tests.engine.helpers import A, B
from tests.scheduling.helpers import until

from .helpers import ask, engine_at, files, is_full_prefill, question, talk, with_kv


class Clock:
    """A clock that the test sets."""

    def __init__(self, engine: Engine) -> None:
        self.now = 1000.0
        engine.sessions.clock = lambda: self.now


class TestFork:
    def test_a_fork_shares_the_past_and_its_blocks_and_continues_separately(
        self, tmp_path: Path
    ) -> None:
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
            assert is_full_prefill(engine, session, 3, ratio=0.0).reuse.exact == 1 + with_kv(
                session
            )
            assert is_full_prefill(engine, other, 4, ratio=0.0).reuse.exact == 1 + with_kv(other)
        with engine_at(tmp_path) as engine:
            assert engine.session("other").turns == 4
            assert is_full_prefill(engine, engine.session("other"), 4).reuse.notes == ()

    def test_deleting_the_original_leaves_its_fork_unharmed(
        self, engine: Engine, tmp_path: Path
    ) -> None:
        session = talk(engine)
        other = session.fork("other")
        session.delete()
        assert is_full_prefill(engine, other, 3, ratio=0.0).reuse.exact == 1 + with_kv(other)
        other.delete()
        engine.flush()
        assert files(tmp_path) == 0

    def test_what_ends_a_request_ends_its_wait_for_a_conversation(self) -> None:
        def over() -> None:
            raise CancelledError("The client has left.")

        with engine_at(None) as engine:
            session = talk(engine)
            other = engine.session("other")
            for wait, held in (
                (lambda: session.fork("other", over), other),
                (lambda: session.discard([(0, 1)], over), session),
                (lambda: session.rewind(1, over), session),
                (lambda: session.reset(over), session),
                (lambda: session.delete(over), session),
            ):
                with held.lock.hold(), pytest.raises(CancelledError):
                    wait()
            assert (session.turns, other.turns) == (3, 0)

    def test_forking_over_an_existing_conversation_is_refused(self) -> None:
        with engine_at(None) as engine:
            session = talk(engine, "s")
            _ = talk(engine, "other", turns=1)
            for taken in ("other", "s"):
                with pytest.raises(InputError, match="conversation"):
                    session.fork(taken)


class TestRewind:
    def test_a_rewound_turn_is_regenerated_without_computing_the_past(self, engine: Engine) -> None:
        session = talk(engine)
        history = session.token_ids[: 2 * 9]
        session.rewind()
        assert (session.token_ids, session.turns) == (history, 2)
        assert is_full_prefill(engine, session, 2, ratio=0.0).reuse.exact == 1 + with_kv(session)
        again = engine.answer(
            question(2), session=session, max_new_tokens=4, temperature=1.0, seed=3
        )
        assert session.token_ids == (*history, *question(2), *again.token_ids)

    def test_rewinding_to_a_past_turn_drops_the_later_turns(self, tmp_path: Path) -> None:
        with engine_at(tmp_path) as engine:
            session = talk(engine, turns=4)
            session.rewind(3)
            engine.flush()
            assert files(tmp_path) == len(session.state.history.blocks)
            ask(engine, session, 9)
            is_full_prefill(engine, session, 2)
        with engine_at(tmp_path) as engine:
            assert engine.session("s").turns == 2

    @pytest.mark.parametrize("turns", [0, 4, -1])
    def test_rewinding_more_turns_than_there_are_is_refused(self, turns: int) -> None:
        with engine_at(None) as engine, pytest.raises(InputError, match="has 3"):
            talk(engine).rewind(turns)

    def test_the_last_turns_can_be_rewound_and_a_manifest_has_no_older_ones(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("ragkv.prompt.history.history.REWINDABLE", 2)
        with engine_at(tmp_path) as engine:
            began = talk(engine, turns=3).token_ids
            _ = talk(engine, turns=5)
        (manifest,) = tmp_path.glob("sessions/*.json")
        assert len(json.loads(manifest.read_text().splitlines()[2])["histories"]) == 2 + 1
        with engine_at(tmp_path) as engine:
            session = engine.session("s")
            assert session.turns == 5
            with pytest.raises(InputError, match="has 5"):
                session.rewind(3)
            session.rewind(2)
            assert (session.turns, session.token_ids) == (3, began)
            ask(engine, session, 3)
            is_full_prefill(engine, session, 4)


class TestUsable:
    def test_a_session_of_another_engine_is_refused_and_neither_engine_gains_a_turn(
        self, tmp_path: Path
    ) -> None:
        with engine_at(tmp_path / "one") as one, engine_at(tmp_path / "other") as other:
            session = talk(one, turns=1)
            with pytest.raises(InputError, match="another engine's"):
                ask(other, session, 1)
            with pytest.raises(InputError, match="another engine's"):
                other.prefill(question(1), session=session)
            assert (session.turns, other.sessions.ids()) == (1, ())

    def test_a_prefill_over_a_deleted_session_is_refused(self, engine: Engine) -> None:
        session = talk(engine, turns=1)
        session.delete()
        with pytest.raises(InputError, match="was deleted"):
            engine.prefill(question(1), session=session)

    def test_a_prefill_reads_no_history_that_was_idle_for_too_long(self, tmp_path: Path) -> None:
        with engine_at(tmp_path, session={"ttl_s": 10.0}) as engine:
            clock = Clock(engine)
            session = talk(engine, turns=1)
            clock.now += 11.0
            prefill = engine.prefill(question(1), session=session)
            assert prefill.token_ids.tolist() == [1, *question(1)]

    def test_a_turn_that_cannot_be_saved_keeps_the_notes_for_the_next_one(
        self, engine: Engine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        session = talk(engine, turns=1)
        session.notes = ("told once",)
        with monkeypatch.context() as patch:
            patch.setattr(engine.sessions.storage, "save", _fail)
            with pytest.raises(SessionUnavailableError):
                ask(engine, session, 1)
        assert "told once" in ask(engine, session, 1).reuse.notes
        assert session.notes == ()


def _fail(*_: object) -> None:
    raise SessionUnavailableError("no server")


class TestDelete:
    def test_deleting_a_session_leaves_nothing_of_it(self, engine: Engine, tmp_path: Path) -> None:
        talk(engine, "a"), talk(engine, "b", turns=1)
        engine.flush()
        engine.session("a").delete()
        engine.flush()
        assert [info.session_id for info in engine.sessions.list()] == ["b"]
        assert files(tmp_path) == len(engine.session("b").state.history.blocks)
        engine.session("b").delete()
        engine.session("never").delete()
        assert files(tmp_path) == len(list((tmp_path / "sessions").iterdir())) == 0
        assert engine.stats().store.tiers[0].entries == 0

    def test_a_deleted_session_object_is_unusable_and_its_id_is_free_again(self) -> None:
        with engine_at(None) as engine:
            session = talk(engine)
            session.delete()
            with pytest.raises(InputError, match="deleted"):
                ask(engine, session, 3)
            assert engine.session("s").turns == 0

    def test_nothing_is_remembered_of_deleted_conversations_in_memory(self) -> None:
        with engine_at(None) as engine:
            storage = engine.sessions.storage
            assert isinstance(storage, FolderStorage)
            empty = {
                name: len(kept)
                for name, kept in vars(storage).items()
                if isinstance(kept, dict | set)
            }
            for name in "abc":
                talk(engine, name, turns=1)
            assert len(storage._newest) == 3
            engine.sessions.delete_all("abc")
            assert empty == {name: len(getattr(storage, name)) for name in empty}

    def test_reset_deletes_every_turn_and_the_session_stays_usable(self, tmp_path: Path) -> None:
        with engine_at(tmp_path) as engine:
            session = talk(engine)
            engine.flush()
            session.reset()
            assert (session.token_ids, session.turns, files(tmp_path)) == ((), 0, 0)
            assert talk(engine, turns=1) is session
        with engine_at(tmp_path) as engine:
            assert engine.session("s").turns == 1

    def test_deleting_chunks_and_collecting_garbage_leave_conversations_alone(
        self, tmp_path: Path
    ) -> None:
        with engine_at(tmp_path, session={"inexact_history": "keep"}) as engine:
            engine.entries.encode([A, B])
            session = engine.session("s")
            ask(engine, session, 0, [A, B])
            engine.flush()
            blocks = len(session.state.history.blocks)
            engine.entries.delete([A])
            assert engine.entries.retain([]) == 1
            assert engine.entries.gc() == 0
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
        second, first = engine.sessions.list()
        assert (first.session_id, first.turns, first.tokens, first.used_at) == ("1", 3, 27, 1000.0)
        assert first.stored_bytes == with_kv(one) * engine.stats().kv_bytes_per_token
        assert (second.session_id, second.used_at) == ("2", 1005.0)
    with engine_at(tmp_path) as engine:
        assert {info.session_id for info in engine.sessions.list()} == {"1", "2"}
        assert engine.sessions.list()[1] == first


class TestTtl:
    def test_a_conversation_idle_past_its_ttl_is_deleted_when_it_is_opened(
        self, tmp_path: Path
    ) -> None:
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

    def test_a_sessions_own_ttl_overrides_the_setting_and_survives_a_restart(
        self, tmp_path: Path
    ) -> None:
        with engine_at(tmp_path) as engine:
            short = engine.session("short", ttl_s=1e-3)
            assert talk(engine, "short") is short
            talk(engine, "long")
        with engine_at(tmp_path) as engine:
            assert [info.session_id for info in engine.sessions.list()] == ["long"]
            assert files(tmp_path) == len(engine.session("long").state.history.blocks)

    def test_an_idle_conversation_does_not_count_but_is_found_where_all_are_deleted(
        self, tmp_path: Path
    ) -> None:
        with engine_at(tmp_path, session=dict(ttl_s=10.0)) as engine:
            clock = Clock(engine)
            talk(engine, "idle")
            clock.now += 11
            assert engine.sessions.ids() == () and not engine.sessions.has("idle")
            assert engine.sessions.ids(idle=True) == ("idle",)

    def test_a_turn_of_another_session_deletes_expired_conversations(self, tmp_path: Path) -> None:
        with engine_at(tmp_path, session=dict(ttl_s=10.0)) as engine:
            clock = Clock(engine)
            talk(engine, "idle")
            clock.now += 11
            talk(engine, "busy", turns=1)
            engine.flush()
            assert [info.session_id for info in engine.sessions.list()] == ["busy"]
            assert files(tmp_path) == 1 == len(list((tmp_path / "sessions").iterdir()))

    def test_an_idle_conversation_waits_to_be_cleared_once_however_often_it_is_looked_for(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with engine_at(tmp_path, session=dict(ttl_s=10.0)) as engine:
            clock = Clock(engine)
            talk(engine, "idle")
            engine.flush()
            jobs: list[Any] = []
            monkeypatch.setattr(
                engine.sessions.blocks.writer, "then", lambda job: not jobs.append(job)
            )
            for _ in range(3):  # the writer is busy, so no job of these is done
                clock.now += 11
                engine.sessions.sweep()
            assert len(jobs) == 1
            monkeypatch.undo()
            jobs[0]()
            assert engine.sessions.list() == ()
            talk(engine, "idle")  # and idle again
            clock.now += 11
            engine.sessions.sweep()
            engine.flush()
            assert engine.sessions.list() == () and files(tmp_path) == 0

    def test_an_idle_conversation_that_the_writer_refuses_is_cleared_by_the_next_sweep(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with engine_at(tmp_path, session=dict(ttl_s=10.0)) as engine:
            clock = Clock(engine)
            talk(engine, "idle")
            engine.flush()
            clock.now += 11
            with monkeypatch.context() as patch:
                patch.setattr(engine.sessions.blocks.writer, "then", lambda _: False)
                engine.sessions.sweep()
            clock.now += 11
            engine.sessions.sweep()
            engine.flush()
            assert files(tmp_path) == 0

    def test_a_session_does_not_expire_while_one_of_its_turns_runs(self, tmp_path: Path) -> None:
        with engine_at(tmp_path, session=dict(ttl_s=10.0)) as engine:
            clock = Clock(engine)
            session = talk(engine)
            stream = engine.stream(question(3), session=session, max_new_tokens=4, min_new_tokens=4)
            next(stream)
            clock.now += 100
            engine.session("s")
            engine.session("other")  # looks for idle conversations
            engine.sessions.blocks.writer.flush()
            assert session.turns == 3
            list(stream)
            assert session.turns == 4
            is_full_prefill(engine, session, 4)


class TestOneSessionAtATime:
    def test_a_second_stream_of_a_session_on_the_same_thread_is_refused(self) -> None:
        with engine_at(None) as engine:
            session = talk(engine, turns=1)
            stream = engine.stream(question(1), session=session, max_new_tokens=4, min_new_tokens=4)
            next(stream)
            for action in (
                lambda: ask(engine, session, 2),
                session.reset,
                session.rewind,
                session.delete,
            ):
                with pytest.raises(InputError, match="under way on this thread"):
                    action()
            engine.prefill(question(2), session=session)  # reads the session as it was
            list(stream)
            assert session.turns == 2

    def test_an_id_names_one_session_object_while_that_is_in_use(self, tmp_path: Path) -> None:
        with engine_at(tmp_path) as engine:
            session = talk(engine)
            assert engine.session("s") is session
            engine.flush()
            gone = weakref.ref(session)
            del session
            # a session that is on disk need not stay in memory
            until(lambda: gc.collect() >= 0 and gone() is None)
            assert engine.session("s").turns == 3
        with engine_at(None) as engine:
            talk(engine)
            gc.collect()
            assert engine.session("s").turns == 3

    def test_an_id_with_half_a_character_is_refused(self) -> None:
        with engine_at(None) as engine, pytest.raises(InputError, match="half a character"):
            engine.session("a\ud800")

    @pytest.mark.parametrize(
        ("wrong", "ttl_s"), [("", 1.0), (None, 1.0), (3, 1.0), ("s", 0), ("s", -1.0)]
    )
    def test_an_id_that_is_no_text_and_a_ttl_of_zero_are_refused(
        self, wrong: Any, ttl_s: float
    ) -> None:
        with (
            engine_at(None) as engine,
            pytest.raises(InputError, match="ttl_s" if wrong == "s" else "id must be a string"),
        ):
            engine.session(wrong, ttl_s=ttl_s)


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


def test_a_manifest_is_readable_by_its_owner_alone_and_its_file_name_hides_the_id(
    tmp_path: Path,
) -> None:
    with engine_at(tmp_path) as engine:
        talk(engine, "alice@example.org")
    (manifest,) = (tmp_path / "sessions").iterdir()
    assert (manifest.stat().st_mode & 0o777, manifest.parent.stat().st_mode & 0o777) == (
        0o600,
        0o700,
    )
    assert "alice" not in manifest.name
    head, summary, _ = map(json.loads, manifest.read_text().splitlines())
    assert head["version"] == 1
    assert summary["session_id"] == "alice@example.org"


def test_the_first_title_of_a_conversation_stays_and_survives_forks_and_restarts(
    tmp_path: Path,
) -> None:
    with engine_at(tmp_path) as engine:
        session = engine.session("s")
        assert session.title == ""
        ask(engine, session, 0, title=None)
        assert session.title == ""
        ask(engine, session, 0, title="Ovens")
        ask(engine, session, 1, title="Pens")
        assert session.fork("t").title == session.title == "Ovens"
    with engine_at(tmp_path) as engine:
        assert engine.session("s").title == "Ovens"
        assert {info.title for info in engine.sessions.list()} == {"Ovens"}
        engine.session("s").reset()
        assert engine.session("s").title == ""
