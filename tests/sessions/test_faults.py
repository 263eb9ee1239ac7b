"""A fault costs recomputing, never gives a wrong answer, and leaves nothing behind."""

import errno
import itertools
import json
import multiprocessing
import os
import random
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from ragkv import Answer, Engine
from ragkv.prompt.history import SAVE_WAIT_S
from ragkv.sessions import folder_storage
from ragkv.sessions.history_blocks import HistoryBlocks
from ragkv.sessions.manifest import _checksum
from tests import tiny_models
from tests.engine.helpers import A, B, Q
from tests.faults import os_error, raising
from tests.scheduling.helpers import begin
from tests.store.fakes import FailingTier, Failure, HeldWrites, ThrottledTier

from .helpers import ask, engine_at, files, is_full_prefill, pinned, question, talk, with_kv

FORKSERVER = multiprocessing.get_context("forkserver")
FORKSERVER.set_forkserver_preload(["tests.stress.writing", "tests.sessions.test_faults"])


def manifest(directory: Path) -> Path:
    (path,) = (directory / "sessions").glob("*.json")
    return path


class TestLostBlock:
    @pytest.mark.parametrize("which", [0, 1, -1])
    def test_a_lost_block_is_computed_and_stored_again(self, engine: Engine, which: int) -> None:
        session = talk(engine)
        engine.flush()
        lost = session.state.history.blocks[which]
        engine.parts.store.delete(lost.key(engine.entries.encoder.identity))
        reuse = is_full_prefill(engine, session, 3, ratio=0.0).reuse
        assert reuse.notes == (f"{len(lost)} history tokens recomputed: its block was lost",)
        assert reuse.exact == 1 + with_kv(session) - len(lost)
        ask(engine, session, 3, ratio=0.0)
        assert is_full_prefill(engine, session, 4, ratio=0.0).reuse.exact == 1 + with_kv(session)

    def test_a_lost_inexact_block_is_stored_again_for_its_own_session(self, tmp_path: Path) -> None:
        with engine_at(tmp_path) as engine:
            engine.entries.encode([A, B])
            session = talk(engine, turns=1)
            ask(engine, session, 1, [A, B], ratio=0.0)
            ask(engine, session, 2, ratio=0.0)
            engine.flush()
            lost = session.state.history.blocks[-1]
            engine.parts.store.delete(lost.key(engine.entries.encoder.identity))
            ask(engine, session, 3, ratio=0.0)
            assert lost not in session.state.history.blocks
            reuse = engine.prefill(question(4), session=session, ratio=0.0).reuse
            assert (reuse.notes, reuse.computed) == ((), 6)
            engine.flush()
        with engine_at(tmp_path) as engine:
            reuse = engine.prefill(question(4), session=engine.session("s"), ratio=0.0).reuse
            assert (reuse.notes, reuse.computed) == ((), 6)

    def test_a_block_damaged_on_disk_is_a_lost_block(self, tmp_path: Path) -> None:
        with engine_at(tmp_path) as engine:
            talk(engine)
        for path in tmp_path.glob("entries/*/*"):
            data = bytearray(path.read_bytes())
            data[-1] ^= 1  # of the last layer
            path.write_bytes(data)
        with engine_at(tmp_path) as engine:
            session = engine.session("s")
            reuse = is_full_prefill(engine, session, 3, ratio=0.0).reuse
            assert reuse.exact == 1
            assert any("checksum" in note for note in reuse.notes)
            ask(engine, session, 3)
            assert is_full_prefill(engine, session, 4).reuse.exact == 1 + with_kv(session)
            assert pinned(engine) == 0

    @pytest.mark.parametrize("failure", Failure)
    def test_a_block_may_turn_out_to_be_lost_in_the_middle_of_a_pass(
        self, tmp_path: Path, failure: Failure
    ) -> None:
        failing = partial(FailingTier, layers=(), failure=failure)
        with engine_at(tmp_path, memory_bytes=0, wrap=failing) as engine:
            session = talk(engine)
            engine.flush()
            (disk,) = engine.parts.store.tiers
            disk.layers = {2}
            reuse = is_full_prefill(engine, session, 3, ratio=0.0).reuse
            assert reuse.exact == 1
            ask(engine, session, 3)
            disk.layers = ()
            is_full_prefill(engine, session, 4, ratio=0.0)
            assert pinned(engine) == 0

    def test_buffers_without_room_delay_the_turns_end_and_lose_nothing(
        self, tmp_path: Path
    ) -> None:
        no_room = dict(memory_bytes=0, write_buffer_bytes=0, session=dict(save_buffer_bytes=0))
        slow = partial(ThrottledTier, bandwidth_bytes_per_s=1e5, writes=True)
        with engine_at(tmp_path, wrap=slow, **no_room) as engine:
            session = engine.session("s")
            (note,) = engine.answer(
                tiny_models.tokens(60), session=session, max_new_tokens=4
            ).reuse.notes
            assert "the turn's end waited" in note and "compute" not in note
            reuse = is_full_prefill(engine, session, 3, ratio=0.0).reuse
            assert (reuse.exact, reuse.notes) == (1 + with_kv(session), ())
            (note,) = engine.append(session, tiny_models.tokens(60, 1), (5, 6)).reuse.notes
            assert "the turn's end waited" in note

    def test_blocks_that_could_not_be_saved_in_time_are_reported_and_computed_again(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("ragkv.sessions.turn.SAVE_WAIT_S", 0.01)
        with engine_at(tmp_path, session=dict(save_buffer_bytes=0)) as engine:
            session = engine.session("s")
            held = threading.Event()
            engine.sessions.blocks.writer.then(held.wait)
            try:
                notes = engine.answer(
                    tiny_models.tokens(30), session=session, max_new_tokens=4
                ).reuse.notes
            finally:
                held.set()
            assert any("the next turn computes them again" in note for note in notes)
            assert is_full_prefill(engine, session, 1, ratio=0.0).reuse.exact < 1 + with_kv(session)


@pytest.mark.parametrize("left", ["a conversation", "blocks alone", "nothing"])
def test_what_an_earlier_process_left_is_looked_through_as_the_engine_opens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, left: str
) -> None:
    with engine_at(tmp_path) as engine:
        if left != "nothing":
            talk(engine, turns=1)
    if left == "blocks alone":
        shutil.rmtree(tmp_path / "sessions")
    looked: list[HistoryBlocks] = []
    monkeypatch.setattr(HistoryBlocks, "delete_orphans", lambda self: looked.append(self))
    with engine_at(tmp_path) as engine:
        engine.flush()
        assert bool(looked) == (left != "nothing")
        assert talk(engine, turns=2).turns == 2
        engine.flush()
        assert len(looked) == (left != "nothing")


@pytest.mark.parametrize("moment", ["when they were listed", "when the first is deleted"])
def test_blocks_that_a_turn_saves_while_orphans_are_deleted_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    with engine_at(tmp_path) as engine:
        before = talk(engine, turns=1).state
    manifest(tmp_path).unlink()
    with monkeypatch.context() as later:
        later.setattr(HistoryBlocks, "delete_orphans", lambda _: 0)  # as the engine opens
        engine = engine_at(tmp_path)
    with engine:
        session = engine.session("s")
        store = engine.parts.store
        turns = []
        orphans = store.contents.block_keys()
        writer = engine.sessions.blocks.writer
        name = "own" if "listed" in moment else "delete"
        real = getattr(writer, name)

        def while_a_turn_runs(*arguments: Any) -> Any:
            if not turns:
                turns.append(
                    engine.stream(question(0), session=session, max_new_tokens=4, min_new_tokens=4)
                )
                while not any(turn.saved_keys for turn in engine.sessions.blocks._turns):
                    next(turns[0])
            return real(*arguments)

        monkeypatch.setattr(writer, name, while_a_turn_runs)
        assert orphans and engine.sessions.blocks.delete_orphans() == len(orphans)
        engine.flush()
        list(turns[0])
        engine.flush()
        assert session.state.history == before.history
        assert set(store.contents.block_keys()) == set(orphans)


def another_digit(data: bytes) -> bytes:
    """A manifest with one digit of one token id changed: still JSON, but another conversation."""
    at = data.index(b"],", data.index(b'"blocks"')) - 1
    return data[:at] + (b"1" if data[at : at + 1] == b"0" else b"0") + data[at + 1 :]


def of_another_session(data: bytes) -> bytes:
    head, summary, body = data.splitlines(keepends=True)
    other = json.dumps({**json.loads(summary), "session_id": "t"}).encode() + b"\n"
    return (
        json.dumps({**json.loads(head), "checksum": _checksum(other + body)}).encode()
        + b"\n"
        + other
        + body
    )


HARMS: dict[str, Callable[[bytes], bytes]] = {
    "cut": lambda data: data[:-20],
    "digit": another_digit,
    "empty": lambda _: b"",
    "swap": of_another_session,
    "age": lambda data: data.replace(b'"version": 1', b'"version": 0', 1),
}


class TestManifest:
    @pytest.mark.parametrize("harm", HARMS)
    def test_a_manifest_that_cannot_be_read_is_moved_aside_and_the_next_report_says_so(
        self, tmp_path: Path, harm: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        with engine_at(tmp_path) as engine:
            talk(engine)
        kept = HARMS[harm](manifest(tmp_path).read_bytes())
        manifest(tmp_path).write_bytes(kept)
        with engine_at(tmp_path) as engine:
            session = engine.session("s")
            assert (session.turns, session.token_ids) == (0, ())
            (note,) = ask(engine, session, 0).reuse.notes
            assert "it starts empty" in note and ("version" in note) == (harm == "age")
            assert ask(engine, session, 1).reuse.notes == ()
            is_full_prefill(engine, session, 2)
        assert "moved aside" in caplog.text
        (aside,) = (path for path in (tmp_path / "sessions").iterdir() if path.suffix != ".json")
        assert aside.read_bytes() == kept
        with engine_at(tmp_path) as engine:
            assert engine.session("s").turns == 2

    def test_a_manifest_of_another_model_is_left_where_it_is(self, tmp_path: Path) -> None:
        with engine_at(tmp_path) as engine:
            before = talk(engine).state
        with engine_at(tmp_path, "qwen2") as engine:
            session = engine.session("s")
            assert session.turns == 0
            assert "another model's" in ask(engine, session, 0).reuse.notes[0]
            assert engine.entries.gc() > 0  # its blocks are deleted only on request
        with engine_at(tmp_path) as engine:
            session = engine.session("s")
            assert session.state == before
            assert is_full_prefill(engine, session, 3).reuse.exact == 1

    def test_a_killed_write_leaves_the_new_manifest_or_the_previous_one(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with engine_at(tmp_path) as engine:
            talk(engine, turns=2)
        real = Path.replace
        stop = raising(os_error(errno.EIO))
        monkeypatch.setattr(
            Path, "replace", lambda self, to: stop() if self.suffix == ".tmp" else real(self, to)
        )
        with engine_at(tmp_path) as engine:
            talk(engine, turns=3)
        monkeypatch.undo()
        (tmp_path / "sessions" / "abandoned.tmp").write_bytes(b"half")
        with engine_at(tmp_path) as engine:
            assert engine.session("s").turns == 2
            is_full_prefill(engine, engine.session("s"), 2)
        assert not list((tmp_path / "sessions").glob("*.tmp"))


def test_a_full_disk_fails_no_answer_and_the_session_lives_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with engine_at(tmp_path) as engine:
        talk(engine, turns=1)
        engine.flush()
        with monkeypatch.context() as patch:
            patch.setattr(os, "write", raising(os_error(errno.ENOSPC)))
            talk(engine, turns=3)
            engine.flush()
        assert "No space left" in caplog.text
        assert not list((tmp_path / "sessions").glob("*.tmp")) + list((tmp_path / "tmp").iterdir())
        session = engine.session("s")
        assert session.turns == 3  # it lives in memory, because it is nowhere else
        reuse = ask(engine, session, 3).reuse
        assert any("No space left" in note for note in reuse.notes)
        assert ask(engine, session, 4).reuse.notes == ()
    with engine_at(tmp_path) as engine:
        session = engine.session("s")
        assert session.turns == 5
        reuse = is_full_prefill(engine, session, 5).reuse
        # the blocks of turns 2 and 3
        assert any("its block was lost" in note for note in reuse.notes)


class TestEviction:
    def test_eviction_of_a_block_that_is_being_read_waits_for_the_reader(
        self, tmp_path: Path
    ) -> None:
        """A memory tier of a few blocks gets new blocks while a throttled pass reads."""
        block = 8 * 4 * 2 * 2 * 16 * 4
        with engine_at(None, memory_bytes=10 * block, wrap=ThrottledTier) as engine:
            session = talk(engine)
            (memory,) = engine.parts.store.tiers
            memory.bandwidth_bytes_per_s = 1e5
            done = threading.Event()

            def push() -> None:
                for number in itertools.count(1000):
                    if done.is_set():
                        return
                    engine.entries.encode([tiny_models.tokens(8, seed=number)])

            pusher = begin(push)
            try:
                passes = 0
                # on a busy machine the writer may be late
                while passes < 3 or not memory.stats().evictions:
                    is_full_prefill(engine, session, 3, ratio=0.0)
                    passes += 1
            finally:
                done.set()
                pusher.join()
            assert memory.stats().evictions > 0
            assert memory.stats().used_bytes <= 10 * block
            assert pinned(engine) == 0

    def test_evicting_all_blocks_costs_only_computing_them(self) -> None:
        with engine_at(None, memory_bytes=8 * 4 * 2 * 2 * 16 * 4) as engine:  # one block
            session = talk(engine)
            engine.flush()  # what waits to be written is read, too
            assert is_full_prefill(engine, session, 3, ratio=0.0).reuse.computed > 20


class TestAbandonedTurn:
    """At every stage: the session is as it was, no lease is open, and no block remains."""

    @pytest.fixture
    def spoken(self, tmp_path: Path) -> Iterator[tuple[Engine, Any, Callable[[], None]]]:
        with engine_at(tmp_path, session=dict(block_tokens=4)) as engine:
            session = talk(engine)
            engine.flush()
            before = session.state
            blocks = files(tmp_path)

            def as_before() -> None:
                engine.flush()
                assert session.state == before
                assert not session.lock.held
                assert (files(tmp_path), pinned(engine)) == (blocks, 0)
                assert engine.stats().store.tiers[0].entries == blocks
                assert is_full_prefill(engine, session, 3, ratio=0.0).reuse.exact == 1 + with_kv(
                    session
                )
                ask(engine, session, 3)
                assert session.turns == 4

            yield engine, session, as_before

    @pytest.mark.parametrize("events", [0, 1, 3, 5])
    @pytest.mark.parametrize("closed", [True, False])
    def test_a_stream_that_is_closed_or_forgotten_leaves_the_session_as_it_was(
        self, spoken: Any, events: int, closed: bool
    ) -> None:
        engine, session, as_before = spoken
        stream = engine.stream(question(7), session=session, max_new_tokens=6, min_new_tokens=6)
        for _ in range(events):
            next(stream)
        if closed:
            stream.close()
        del stream
        as_before()

    @pytest.mark.parametrize("after", [0, 2, 5, 9])
    def test_a_pass_that_fails_leaves_the_session_as_it_was(
        self, spoken: Any, monkeypatch: pytest.MonkeyPatch, after: int
    ) -> None:
        """At the first layer, in the middle of the prefill, and in the middle of the answer."""
        engine, session, as_before = spoken
        adapter = engine.model.adapter
        calls = iter(range(1000))
        real = adapter.call_layer

        def fails(*arguments: Any) -> Any:
            if next(calls) >= after:
                raise KeyboardInterrupt
            return real(*arguments)

        with monkeypatch.context() as patch:
            patch.setattr(adapter, "call_layer", fails)
            with pytest.raises(KeyboardInterrupt):
                ask(engine, session, 7)
        as_before()

    def test_an_abandoned_turn_that_recomputed_lost_blocks_leaves_the_session_as_it_was(
        self, spoken: Any, tmp_path: Path
    ) -> None:
        engine, session, _ = spoken
        blocks = files(tmp_path)
        engine.parts.store.delete(
            session.state.history.blocks[0].key(engine.entries.encoder.identity)
        )
        stream = engine.stream(question(7), session=session, max_new_tokens=6, min_new_tokens=6)
        next(stream)
        stream.close()
        engine.flush()
        assert files(tmp_path) == blocks  # the block is kept: it is in the history
        assert is_full_prefill(engine, session, 3, ratio=0.0).reuse.notes == ()


class TestSlowDisk:
    def test_a_slow_disk_delays_no_turn_and_waiting_blocks_are_found(self, tmp_path: Path) -> None:
        """While one turn is being written, four more turns are answered from blocks that wait to be
        written.
        """
        with engine_at(tmp_path, memory_bytes=0, wrap=HeldWrites) as engine:
            (held,) = engine.parts.store.tiers
            held.go.set()
            session = talk(engine, turns=1)
            engine.flush()
            held.go.clear()
            held.waiting.clear()
            talk(engine, turns=5)
            reuse = is_full_prefill(engine, session, 5, ratio=0.0).reuse
            assert held.waiting.is_set() and not held.too_long
            assert reuse.exact == 1 + with_kv(session)
            held.go.set()
            engine.flush()
            assert files(tmp_path) == len(session.state.history.blocks)

    def test_a_session_tells_when_its_last_turn_is_on_disk(self, engine: Engine) -> None:
        session = talk(engine, turns=1)
        assert session.wait_saved(60) is None
        with engine.sessions.storage._writing:  # type: ignore[attr-defined]
            talk(engine, turns=2)
            assert "was not written to disk within 0.01 s" in str(session.wait_saved(0.01))
        assert session.wait_saved(60) is None

    def test_turns_wait_for_a_slow_disk_and_fill_no_memory(
        self, engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        session = talk(engine, turns=1)
        engine.flush()
        storage = engine.sessions.storage
        assert isinstance(storage, folder_storage.FolderStorage)
        monkeypatch.setattr(folder_storage, "SAVE_WAIT_S", 0.01)
        with storage._writing:
            storage._writer.capacity_bytes = 1  # room for one, whatever its size
            ask(engine, session, 1)
            ask(engine, session, 2)
            note = session.wait_saved(0.0)
        assert note is not None and "the disk is too slow" in note
        engine.flush()
        assert note in ask(engine, session, 3).reuse.notes
        assert session.wait_saved(60) is None
        engine.close()
        with engine_at(tmp_path) as reopened:
            assert reopened.session("s").turns == 4

    @pytest.mark.parametrize("end", ["flush", "close"])
    def test_a_turn_that_a_slow_disk_refused_is_written_at_the_end(
        self, engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str
    ) -> None:
        session = talk(engine, turns=1)
        engine.flush()
        storage = engine.sessions.storage
        assert isinstance(storage, folder_storage.FolderStorage)
        monkeypatch.setattr(folder_storage, "SAVE_WAIT_S", 0.01)
        with storage._writing:
            storage._writer.capacity_bytes = 1
            talk(engine, turns=3)
            assert "the disk is too slow" in str(session.wait_saved(0.0))
        getattr(engine, end)()
        stored = folder_storage.FolderStorage(tmp_path, storage.base).load("s", None)
        assert stored is not None and stored.state == session.state

    @pytest.mark.parametrize("end", ["reset", "delete"])
    def test_a_turn_that_waits_to_be_written_never_comes_back_after_a_deletion(
        self, engine: Engine, tmp_path: Path, end: str
    ) -> None:
        session = talk(engine, turns=1)
        engine.flush()
        with engine.sessions.storage._writing:  # type: ignore[attr-defined]
            talk(engine, turns=3)
            thread = begin(getattr(session, end))
        thread.join(20)
        engine.flush()
        assert not list((tmp_path / "sessions").glob("*.json")) and files(tmp_path) == 0


def speak_for_ever(directory: Path, diary: Path) -> None:
    """The process to kill: endless turns of three sessions; a line in the diary says that a turn
    must be there.
    """
    torch.set_num_threads(1)
    lines = os.open(diary, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    with engine_at(directory) as engine:
        for turn in range(10_000):
            session = engine.session(f"s{turn % 3}")
            if session.turns == 12:
                session.delete()
                continue
            engine.append(session, question(session.turns), tiny_models.tokens(4, seed=turn))
            if turn % 5 == 0:
                engine.flush()
                os.write(lines, f"{session.session_id} {session.turns}\n".encode())


@pytest.mark.parametrize(
    "kills", [3, pytest.param(60, marks=[pytest.mark.slow, pytest.mark.timeout(1500)])]
)
def test_a_process_killed_while_saving_leaves_nothing_wrong_behind(
    tmp_path: Path, kills: int
) -> None:
    choose = random.Random(kills)
    turns = 0
    for number in range(kills):
        diary = tmp_path / f"diary-{number}"
        child = FORKSERVER.Process(
            target=speak_for_ever, args=(tmp_path / "kv", diary), daemon=True
        )
        child.start()
        while not diary.exists() or not diary.read_text():
            assert child.is_alive()
            time.sleep(0.01)
        time.sleep(choose.uniform(0.0, 0.3))
        assert child.pid is not None
        os.kill(child.pid, signal.SIGKILL)
        child.join()
        child.close()
        with engine_at(tmp_path / "kv") as engine:
            for info in engine.sessions.list():
                session = engine.session(info.session_id)
                assert session.turns == info.turns
                assert is_full_prefill(engine, session, 99, ratio=0.0).reuse.missed_chunks == 0
                turns += session.turns
            assert not list((tmp_path / "kv" / "sessions").glob("*.tmp"))
            assert not list((tmp_path / "kv" / "sessions").glob("*.damaged"))
            assert pinned(engine) == 0
            for promised in diary.read_text().splitlines()[-1:]:
                # a session with more than six turns may be deleted by now
                name, kept = promised.split()
                assert int(kept) > 6 or engine.session(name).turns >= int(kept)
    assert turns > 0


def test_history_is_never_read_as_a_chunk_nor_a_chunk_as_history(tmp_path: Path) -> None:
    """The same ids behind the same prefix have two keys: deleting one entry leaves the other."""
    with engine_at(tmp_path, session=dict(block_tokens=len(A))) as engine:
        engine.entries.encode([A])
        session = engine.session("s")
        engine.append(session, A, Q)
        engine.flush()
        assert files(tmp_path) == 1 + len(session.state.history.blocks)
        session.delete()
        assert engine.entries.encode([A]).present == 1


def test_a_turn_that_ends_after_its_engine_was_closed_does_not_wait_for_storage(
    engine: Engine,
) -> None:
    session = engine.session("s")
    stream = engine.stream(question(0), [], session, max_new_tokens=24, min_new_tokens=24)
    next(stream)
    engine.close()
    began_s = time.monotonic()
    *_, answer = stream
    assert isinstance(answer, Answer) and len(answer.token_ids) == 24
    assert time.monotonic() - began_s < SAVE_WAIT_S / 2
    assert any("blocks are not saved" in note for note in answer.reuse.notes)
