"""What changes a conversation while a turn, a copy or a deletion of it is under way."""

import threading
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from ragkv import Engine
from ragkv.errors import CancelledError, InputError, SessionUnavailableError, StoreError
from ragkv.prompt.history import BlockWriter
from ragkv.sessions import Session, Sessions, folder_storage
from ragkv.sessions.folder_storage import FolderStorage
from ragkv.sessions.history_blocks import HistoryBlocks
from ragkv.sessions.storage import StoredState
from ragkv.store.store import Store
from tests.faults import raising
from tests.scheduling.helpers import begin, until

from .helpers import ask, engine_at, files, is_full_prefill, question, talk


def test_a_time_to_live_that_is_set_while_a_turn_ends_is_kept(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = talk(engine, turns=1)
    commit = Session.commit

    def set_before(self: Session, *arguments: Any) -> None:
        monkeypatch.undo()
        engine.session("s", ttl_s=50)
        commit(self, *arguments)

    monkeypatch.setattr(Session, "commit", set_before)
    ask(engine, session, 1)
    assert (session.turns, session.state.ttl_s) == (2, 50)
    engine.flush()
    (summary,) = engine.sessions.storage.summaries()
    assert summary.ttl_s == 50


@pytest.mark.parametrize("end", ["reset", "delete"])
def test_a_time_to_live_that_is_set_during_a_deletion_saves_no_deleted_turn(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, end: str
) -> None:
    session = talk(engine, turns=1)
    engine.flush()
    delete = FolderStorage.delete
    setting: list[threading.Thread] = []

    def set_after(self: FolderStorage, *arguments: Any) -> None:
        delete(self, *arguments)
        setting.append(begin(lambda: engine.session("s", ttl_s=50)))
        setting[0].join(0.5)  # for ever, if the deletion keeps it waiting

    monkeypatch.setattr(FolderStorage, "delete", set_after)
    getattr(session, end)()
    setting[0].join(60)
    assert not setting[0].is_alive()
    engine.flush()
    assert not engine.sessions.storage.summaries()
    assert not list(tmp_path.glob("sessions/*.json")) and files(tmp_path) == 0


@pytest.mark.parametrize(("act", "kept"), [("save", [50]), ("delete", [])])
def test_who_sets_a_time_to_live_waits_for_no_turn_that_waits_for_the_disk(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, act: str, kept: list[int]
) -> None:
    session = talk(engine, turns=1)
    engine.flush()
    slow = getattr(FolderStorage, act)
    waits, go_on = threading.Event(), threading.Event()

    def wait_first(self: FolderStorage, *arguments: Any) -> Any:
        monkeypatch.undo()
        waits.set()
        assert go_on.wait(60)
        return slow(self, *arguments)

    monkeypatch.setattr(FolderStorage, act, wait_first)
    turn = begin(lambda: ask(engine, session, 1) if act == "save" else session.reset())
    assert waits.wait(60)
    setting = begin(lambda: engine.session("s", ttl_s=50))
    setting.join(30)
    is_waiting = setting.is_alive()
    go_on.set()
    turn.join(60)
    assert not is_waiting
    assert (session.turns, session.state.ttl_s) == (2 * len(kept), 50)
    engine.flush()
    assert [summary.ttl_s for summary in engine.sessions.storage.summaries()] == kept


@pytest.mark.parametrize("during", [False, True])
def test_a_time_to_live_that_is_set_needs_no_room_among_the_writes_that_wait(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, during: bool
) -> None:
    session = talk(engine, turns=1)
    engine.flush()
    storage = engine.sessions.storage
    assert isinstance(storage, FolderStorage)
    monkeypatch.setattr(folder_storage, "SAVE_WAIT_S", 0.1)
    with storage._writing:
        storage._writer.capacity_bytes = 1  # room for one state, whatever its size
        ask(engine, session, 1)
        # during a change it is saved once the state is replaced
        with session._replacing() if during else nullcontext():
            engine.session("s", ttl_s=50)
    assert session.wait_saved(60) is None and session.notes == ()
    engine.close()
    with engine_at(tmp_path) as reopened:
        assert reopened.session("s").turns == 2
        assert reopened.session("s").state.ttl_s == 50


@pytest.mark.parametrize("how", ["cancelled", "too late"])
def test_the_end_of_a_turn_waits_for_no_manifest_once_its_claim_is_over(
    engine: Engine, tmp_path: Path, how: str
) -> None:
    session = talk(engine, turns=1)
    engine.flush()
    storage = engine.sessions.storage
    assert isinstance(storage, FolderStorage)
    cancel = threading.Event()
    options: dict[str, Any] = {"cancel": cancel} if how == "cancelled" else {"deadline_s": 5.0}
    with storage._writing:
        storage._writer.capacity_bytes = 1
        ask(engine, session, 1)
        turn = begin(lambda: engine.append(session, question(2), question(3), **options))
        until(lambda: session._is_replaced)
        cancel.set()
        turn.join(15)
        is_waiting = turn.is_alive()
    turn.join(60)
    assert not is_waiting and session.turns == 3
    note = session.wait_saved(0.0)
    assert note is not None and "was not written to disk" in note
    engine.close()
    with engine_at(tmp_path) as reopened:
        assert reopened.session("s").turns == 3


def test_turns_of_a_conversation_run_in_the_order_in_which_they_came(engine: Engine) -> None:
    session = engine.session("s")
    ran: list[int] = []

    def change(number: int) -> None:
        with session.held(lambda: None):
            ran.append(number)

    with session.held():
        threads = []
        for number in range(8):
            threads.append(begin(change, number))
            until(lambda: session.lock.waiting == len(threads))
    for thread in threads:
        thread.join(60)
    assert ran == list(range(8))


def test_a_stream_that_went_to_another_thread_keeps_the_first_one_waiting(engine: Engine) -> None:
    session = talk(engine, turns=1)
    stream = engine.stream(question(1), session=session, max_new_tokens=4, min_new_tokens=4)
    next(stream)
    with pytest.raises(InputError, match="on this thread"):
        session.reset()
    continuing = begin(lambda: next(stream))
    continuing.join(60)
    with pytest.raises(CancelledError):
        session.reset(raising(CancelledError("waited")))
    list(stream)
    session.reset()
    assert session.turns == 0


def test_a_thread_with_the_id_of_one_that_ended_waits_for_its_stream(engine: Engine) -> None:
    session = talk(engine, turns=1)
    stream = engine.stream(question(1), session=session, max_new_tokens=4, min_new_tokens=4)
    said: list[Exception] = []

    def reset() -> None:
        try:
            session.reset(raising(CancelledError("waited")))
        except (InputError, CancelledError) as error:
            said.append(error)

    first = begin(lambda: next(stream))
    first.join(60)
    for _ in range(1000):
        again = begin(reset)
        again.join(60)
        if again.ident == first.ident:
            break
    else:
        pytest.skip("this system gives no id twice")
    assert {type(error) for error in said} == {CancelledError}
    list(stream)


@pytest.mark.parametrize("change", ["reset", "load"])
def test_notes_change_while_nobody_else_changes_them(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    session = talk(engine, turns=1)
    session.note("before")
    found = StoredState(session.version, session.state, ("found",))
    monkeypatch.setattr(FolderStorage, "load", lambda *_: found)
    with session._noting:
        thread = begin(getattr(session, change))
        thread.join(0.3)
        assert session.notes == ("before",)
    thread.join(60)
    assert session.notes == (("before", "found") if change == "load" else ())


def test_who_only_opens_a_conversation_waits_for_no_save(engine: Engine) -> None:
    session = talk(engine, turns=1)
    saving, go_on = threading.Event(), threading.Event()

    def save() -> None:
        with session.held(), session._changing:
            saving.set()
            assert go_on.wait(60)

    thread = begin(save)
    assert saving.wait(60)
    opening = begin(lambda: engine.session("s"))
    opening.join(30)
    waits = opening.is_alive()
    go_on.set()
    thread.join(60)
    assert not waits


def test_a_note_that_comes_during_a_turn_is_in_the_report_of_the_next_one(engine: Engine) -> None:
    session = talk(engine, turns=1)
    session.note("old")
    stream = engine.stream(question(1), session=session, max_new_tokens=4, min_new_tokens=4)
    next(stream)
    session.note("new")
    *_, answer = stream
    assert "old" in answer.reuse.notes and "new" not in answer.reuse.notes
    assert session.notes == ("new",)
    assert ask(engine, session, 2).reuse.notes == ("new",)
    assert session.notes == ()


def test_a_block_that_a_turn_saves_while_another_conversation_drops_it_is_kept(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two conversations of the same words have the same exact blocks; one is reset."""
    first = talk(engine, "a", turns=1)
    engine.flush()
    other = engine.session("b")
    used_keys, asked, go_on = HistoryBlocks._used, threading.Event(), threading.Event()

    def slow(self: HistoryBlocks) -> Any:
        used = used_keys(self)
        asked.set()
        assert go_on.wait(60)
        return used

    monkeypatch.setattr(HistoryBlocks, "_used", slow)
    resetting = begin(first.reset)
    assert asked.wait(60)
    stream = engine.stream(question(0), session=other, max_new_tokens=4, min_new_tokens=4)
    for _ in range(3):
        next(stream)
    go_on.set()
    resetting.join(60)
    monkeypatch.undo()
    list(stream)
    engine.flush()
    writer = engine.sessions.blocks.writer
    assert all(writer.stored(writer.key(block)) for block in other.history.blocks)
    assert is_full_prefill(engine, other, 1).reuse.notes == ()
    assert not engine.sessions.blocks._being_deleted


@pytest.mark.parametrize("end", ["reset", "delete", "rewind"])
def test_a_fork_keeps_the_blocks_of_a_conversation_that_ends_meanwhile(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    session = talk(engine, turns=2)
    find = Sessions.open

    def ended_before(self: Sessions, *arguments: Any) -> Any:
        monkeypatch.undo()
        getattr(session, end)()
        engine.flush()
        return find(self, *arguments)

    monkeypatch.setattr(Sessions, "open", ended_before)
    fork = session.fork("copy")
    engine.flush()
    assert is_full_prefill(engine, fork, 2).reuse.notes == ()


def test_an_unsaved_copy_keeps_the_blocks_of_a_conversation_that_ends_meanwhile(
    engine: Engine,
) -> None:
    session = talk(engine, turns=2)
    copy = engine.sessions.unsaved("copy", session)
    session.delete()
    engine.flush()
    assert is_full_prefill(engine, copy, 2).reuse.notes == ()


def test_a_save_waits_for_a_deletion_only_as_long_as_it_may(engine: Engine) -> None:
    session = talk(engine, turns=1)
    engine.flush()
    blocks = engine.sessions.blocks
    block = session.history.blocks[0]
    writer: BlockWriter = blocks.writer
    lease = writer.lease(block)
    assert lease is not None
    kv = lease.read_entry().layers
    lease.close()
    blocks._being_deleted[writer.key(block)] += 1
    assert not blocks.save(block, kv, "s", 0.0)
    assert not blocks.save(block, kv, "s", 0.01)
    blocks._being_deleted.clear()
    assert blocks.save(block, kv, "s", 0.0)


@pytest.mark.parametrize("change", ["delete", "reset", "rewind"])
def test_who_waits_to_change_a_conversation_may_give_up(engine: Engine, change: str) -> None:
    session = talk(engine, turns=1)
    stream = engine.stream(question(1), session=session, max_new_tokens=4, min_new_tokens=4)
    next(stream)
    gave_up = threading.Event()

    def give_up() -> None:
        gave_up.set()
        raise CancelledError("The client left.")

    def wait() -> None:
        with pytest.raises(CancelledError):
            getattr(session, change)(check=give_up)

    waiting = begin(wait)
    assert gave_up.wait(30)
    waiting.join(30)
    assert not waiting.is_alive()
    list(stream)
    assert session.turns == 2


def test_a_list_of_conversations_asks_no_server_for_their_blocks(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    talk(engine, turns=1)
    engine.flush()
    (before,) = engine.sessions.list()
    tier = engine.parts.store.tiers[-1]
    monkeypatch.setattr(type(tier), "is_remote", True)
    monkeypatch.setattr(type(tier), "contains", lambda *_: pytest.fail("it was asked"))
    (after,) = engine.sessions.list()
    assert (before.turns, after.turns) == (1, 1)
    assert after.stored_bytes <= before.stored_bytes


@pytest.mark.parametrize(
    ("of", "name", "error"),
    [(HistoryBlocks, "_used", SessionUnavailableError("Away.")), (Store, "delete", StoreError())],
)
def test_blocks_that_could_not_be_deleted_are_deleted_with_the_next_ones(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, of: type, name: str, error: Exception
) -> None:
    session = talk(engine, turns=1)
    engine.flush()
    blocks = engine.sessions.blocks
    keys = blocks.keys(session.state)
    with monkeypatch.context() as patch:
        patch.setattr(of, name, raising(error))
        session.delete()
    assert all(map(blocks.writer.stored, keys))
    blocks.delete_unused()
    assert not any(map(blocks.writer.stored, keys))


def test_two_threads_may_delete_a_conversation(engine: Engine) -> None:
    session = talk(engine, turns=1)
    with session.held():
        deleting = [begin(session.delete) for _ in range(2)]
    for thread in deleting:
        thread.join(60)
    session.delete()
    assert session.deleted and not engine.sessions.ids()


def test_an_error_while_blocks_are_closed_keeps_no_states_open(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed = list[str]()
    sessions = engine.sessions
    with monkeypatch.context() as patch:
        patch.setattr(sessions.blocks.writer, "close", raising(OSError("no space")))
        patch.setattr(sessions.storage, "close", lambda: closed.append("states"))
        with pytest.raises(OSError, match="no space"):
            sessions.close()
    assert closed == ["states"]
