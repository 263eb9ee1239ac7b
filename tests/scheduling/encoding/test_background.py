"""A damaged or missing entry never fails a request and never gives wrong bytes; a deleted entry is
a miss.
"""

import itertools
import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ragkv import Engine, StoreConfig
from ragkv.errors import EntryDamagedError
from ragkv.fusion import Fusor
from ragkv.runtime import Claim
from ragkv.scheduling.encoding import background as background_module
from ragkv.store.durable import DurableTiers
from ragkv.store.entry import EntryKey
from ragkv.store.record import read_head
from ragkv.store.tiers import DiskTier, Lease, MemoryTier
from tests.engine.helpers import A, B, C, Q, close, counts, engine_of, full_prefill, ids, stored
from tests.faults import raising
from tests.scheduling.helpers import begin, until
from tests.store.fakes import WrappedLease


def on_disk(directory: Path, **changes: Any) -> Engine:
    """An engine that reads only from disk."""
    return engine_of(store=StoreConfig(directory=str(directory), memory_bytes=0, **changes))


def file_of(engine: Engine, directory: Path, chunk: list[int]) -> Path:
    key = engine.entries.encoder.identity.key(chunk)
    (found,) = directory.glob(f"entries/*/{key.to_text()}.kv")
    return found


def damage_layer(file: Path, layer: int) -> None:
    """Flip one bit of a layer's bytes."""
    key = EntryKey.from_text(file.stem)
    assert key is not None
    with file.open("rb") as opened:
        head = read_head(opened.fileno(), key)
    data = bytearray(file.read_bytes())
    data[head.layer_start(layer) + 5] ^= 1
    file.write_bytes(data)


class BadLease(WrappedLease):
    """A lease whose reads fail from a layer on."""

    def __init__(self, lease: Lease, layer: int, error: Exception) -> None:
        super().__init__(lease)
        self._layer = layer
        self._error = error

    def read_layer(self, layer: int, out: torch.Tensor | None = None) -> torch.Tensor:
        if layer >= self._layer:
            raise self._error
        return self.lease.read_layer(layer, out)


def spoil(
    monkeypatch: pytest.MonkeyPatch, tier: type[Any], chunk: list[int], make: Callable[[Lease], Any]
) -> None:
    """Make `tier` lease a bad entry of `chunk` from now on."""
    original = tier.lease

    def lease(self: Any, identity: Any, token_ids: Any) -> Lease | None:
        found = original(self, identity, token_ids)
        return make(found) if found is not None and list(token_ids) == chunk else found

    monkeypatch.setattr(tier, "lease", lease)


class TestDamage:
    @pytest.mark.parametrize("layer", [0, 1, 2, 3])
    @pytest.mark.parametrize("selector", ["hkvd-gradual", "first-k"])
    def test_damage_found_at_any_layer_is_answered_like_a_miss(
        self, tmp_path: Path, layer: int, selector: str
    ) -> None:
        with on_disk(tmp_path) as engine:
            engine.entries.encode([A, C])
            # B was never stored
            missed = engine.prefill(Q, [A, B, C], selector=selector, ratio=0.3)
            engine.flush()
            damage_layer(file_of(engine, tmp_path, B), layer)

            damaged = engine.prefill(Q, [A, B, C], selector=selector, ratio=0.3)
            assert torch.equal(damaged.logits, missed.logits)
            assert counts(damaged.reuse) == counts(missed.reuse)
            assert (damaged.reuse.missed_chunks, damaged.reuse.bytes_by_tier) == (
                1,
                missed.reuse.bytes_by_tier,
            )
            (note,) = damaged.reuse.notes
            assert str(engine.entries.encoder.identity.key(B)) in note
            assert "miss" in note

            engine.flush()
            assert engine.prefill(Q, [A, B, C], ratio=0.0).reuse.missed_chunks == 0
            assert engine.stats().store.tiers[0].damaged >= 1

    def test_a_damaged_file_is_a_miss_and_the_entry_is_encoded_again(self, tmp_path: Path) -> None:
        with on_disk(tmp_path) as engine:
            engine.entries.encode([A])
            engine.entries.encode(
                [B]
            )  # alone, as it is encoded again: rounding may depend on the batch
            file = file_of(engine, tmp_path, B)
            whole = file.read_bytes()
            for damaged in (b"", whole[:5000], b"x" + whole[1:], whole[:-1]):
                file.write_bytes(damaged)
                assert engine.prefill(Q, [A, B]).reuse.missed_chunks == 1
                engine.flush()
                assert file.read_bytes() == whole
                assert engine.prefill(Q, [A, B]).reuse.missed_chunks == 0

    def test_a_prompt_whose_entries_are_all_damaged_is_a_full_prefill(self, tmp_path: Path) -> None:
        with on_disk(tmp_path) as engine:
            engine.entries.encode([A, B, C])
            for chunk in (A, B, C):
                damage_layer(file_of(engine, tmp_path, chunk), 2)
            prefill = engine.prefill(Q, [A, B, C], ratio=0.0)
            close(prefill.logits, full_prefill(ids([A, B, C]))[0])
            assert prefill.reuse.missed_chunks == 3
            assert prefill.reuse.notes

    def test_damage_of_a_chunk_that_occurs_twice_is_reported_once(self, tmp_path: Path) -> None:
        with on_disk(tmp_path) as engine:
            engine.entries.encode([A, B])
            damage_layer(file_of(engine, tmp_path, B), 1)
            reuse = engine.prefill(Q, [A, B, B]).reuse
            assert (reuse.missed_chunks, len(reuse.notes)) == (2, 1)

    @pytest.mark.parametrize("tier", [MemoryTier, DiskTier])
    @pytest.mark.parametrize(
        "error", [EntryDamagedError("?", "why"), OSError("gone"), RuntimeError("broken")]
    )
    def test_any_error_that_a_tier_raises_while_reading_is_a_miss(
        self, tmp_path: Path, tier: type[Any], error: Exception, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        memory = 0 if tier is DiskTier else 10**6
        with engine_of(store=StoreConfig(directory=str(tmp_path), memory_bytes=memory)) as engine:
            engine.entries.encode([A, B])
            spoil(monkeypatch, tier, B, lambda lease: BadLease(lease, 2, error))
            prefill = engine.prefill(Q, [A, B], ratio=0.0)
            close(prefill.logits, full_prefill(ids([A, B]))[0])
            assert prefill.reuse.missed_chunks == len(prefill.reuse.notes) == 1

    def test_a_tier_that_always_fails_costs_only_speed(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        with engine_of() as engine, caplog.at_level(logging.CRITICAL):
            engine.entries.encode([A])
            for method in ("lease", "put"):
                monkeypatch.setattr(MemoryTier, method, raising(OSError("no more")))
            close(engine.prefill(Q, [A, B]).logits, full_prefill(ids([A, B]))[0])
            engine.flush()
            assert engine.entries.encode([C]).failed == 1


class TestDeletion:
    def test_deleting_a_chunk_that_waits_to_be_encoded_keeps_it_out_of_the_store(
        self, engine: Engine
    ) -> None:
        with engine.parts.scheduler.request():  # background encoding waits
            assert engine.prefill(Q, [A, B]).reuse.missed_chunks == 2
            assert engine.entries.delete([A]) == 0
        engine.flush()
        assert stored(engine, A) is None
        assert stored(engine, B) is not None

    def test_deleting_a_chunk_while_it_is_encoded_keeps_it_out_of_the_store(
        self, engine: Engine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        encoding = threading.Event()
        deleted = threading.Event()
        original = engine.entries.encoder.chunks

        def slow(*wanted: Any) -> Any:
            encoding.set()
            assert deleted.wait(60)
            return original(*wanted)

        monkeypatch.setattr(engine.entries.encoder, "chunks", slow)
        engine.prefill(Q, [A])
        assert encoding.wait(60)
        engine.entries.delete([A])
        deleted.set()
        engine.flush()
        assert stored(engine, A) is None

    def test_deleting_a_chunk_during_a_request_that_missed_it_keeps_it_out_of_the_store(
        self, engine: Engine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        prepared = Fusor.prepared

        def deleting(*args: Any, **kwargs: Any) -> Any:
            engine.entries.delete([A])
            return prepared(*args, **kwargs)

        monkeypatch.setattr(Fusor, "prepared", deleting)
        engine.prefill(Q, [A])
        monkeypatch.undo()
        engine.flush()
        assert stored(engine, A) is None


def test_an_answer_waits_for_missed_chunks_no_longer_than_its_deadline(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    late = SimpleNamespace(
        perf_counter=lambda: time.perf_counter() + 600.0, monotonic=time.monotonic
    )
    settle = engine.settle

    def settle_late(claim: Claim) -> None:
        monkeypatch.setattr("ragkv.runtime.waiting.time", late)
        settle(claim)

    monkeypatch.setattr(engine, "settle", settle_late)
    with engine.model.compute.encoding.hold("another"):  # so no chunk is encoded
        thread = begin(lambda: engine.answer(Q, [A], max_new_tokens=2, deadline_s=600.0))
        thread.join(60)
        assert not thread.is_alive()
    engine.flush()
    assert stored(engine, A) is not None


def test_an_answer_waits_for_its_own_missed_chunks_alone(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.entries.encode([A])
    waits: list[Claim] = []
    monkeypatch.setattr(engine, "settle", waits.append)
    engine.answer(Q, [A], max_new_tokens=2)
    assert not waits
    engine.answer(Q, [A, B], max_new_tokens=2)
    assert len(waits) == 1


class TestWarming:
    def test_warm_counts_each_chunk_once_and_reports_progress(self, tmp_path: Path) -> None:
        with engine_of(store=StoreConfig(directory=str(tmp_path))) as engine:
            steps: list[tuple[int, int]] = []
            report = engine.entries.encode(
                [A, B, A], lambda done, total: steps.append((done, total))
            )
            assert (report.encoded, report.present, report.failed) == (2, 0, 0)
            assert steps == [(2, 2)]  # chunks that are computed together are counted together
            again = engine.entries.encode(
                [A, B, C], lambda done, total: steps.append((done, total))
            )
            assert steps[1:] == [(1, 3), (2, 3), (3, 3)]
            assert (again.encoded, again.present) == (1, 2)
            assert engine.entries.encode([]).encoded == 0
            assert len(list(tmp_path.glob("entries/*/*.kv"))) == 3

    def test_warm_counts_a_chunk_that_does_not_fit_as_failed(self) -> None:
        with engine_of(store=StoreConfig(memory_bytes=100)) as engine:
            assert engine.entries.encode([A]).failed == 1
            assert engine.prefill(Q, [A]).reuse.missed_chunks == 1


class TestWaiting:
    def test_an_error_between_two_chunks_keeps_nobody_waiting(
        self, engine: Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        background = engine.entries.background
        with monkeypatch.context() as failing, caplog.at_level(logging.CRITICAL):
            failing.setattr(DurableTiers, "room_bytes", raising(OSError("gone")))
            background.add(tuple(A), last=True)
            flushing = begin(background.flush)
            flushing.join(30)
        assert not flushing.is_alive()
        background.add(tuple(B))  # which begins another thread
        background.flush()
        assert stored(engine, A) is None
        assert stored(engine, B) is not None

    def test_a_store_without_a_tier_keeps_nobody_waiting_and_has_nothing(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        with engine_of(store=StoreConfig(memory_bytes=0)) as engine:
            engine.entries.encode_soon([A], last=True)
            flushing = begin(engine.flush)
            flushing.join(30)
            assert not flushing.is_alive()
            report = engine.entries.encode([A])
            assert (report.present, report.failed) == (0, 1)
            close(engine.prefill(Q, [A]).logits, full_prefill(ids([A]))[0])
            assert engine.entries.retain([A]) == 0
        assert not [one for one in caplog.records if one.levelno >= logging.ERROR]

    def test_a_flush_ends_while_other_chunks_keep_coming(
        self, engine: Engine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        background = engine.entries.background
        encode = background._encode
        numbers = itertools.count()

        def encode_and_miss_another(wanted: tuple[int, ...]) -> None:
            encode(wanted)
            number = next(numbers)
            background.add((3 + number % 40, 3 + number // 40, *A))

        monkeypatch.setattr(background, "_encode", encode_and_miss_another)
        background.add(tuple(A))
        flushing = begin(background.flush)
        flushing.join(60)
        assert not flushing.is_alive()
        assert stored(engine, A) is not None

    def test_a_chunk_for_which_no_thread_can_begin_stays_a_miss(
        self, engine: Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        background = engine.entries.background
        with monkeypatch.context() as full:
            full.setattr(threading.Thread, "start", raising(RuntimeError("can't start new thread")))
            background.add(tuple(A))
            background.flush()
        assert "can't start new thread" in caplog.text and stored(engine, A) is None
        background.add(tuple(A))
        background.flush()
        assert stored(engine, A) is not None

    def test_an_interrupted_flush_lets_chunks_wait_for_idle_time_again(
        self, engine: Engine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        background = engine.entries.background
        with monkeypatch.context() as interrupted:
            interrupted.setattr(background._changed, "wait_for", raising(KeyboardInterrupt()))
            with pytest.raises(KeyboardInterrupt):
                background.flush()
        assert background._flushing == 0

    def test_a_chunk_for_which_a_request_waits_is_not_the_one_that_is_dropped(
        self, engine: Engine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(background_module, "MOST_WAITING", 2)
        background = engine.entries.background
        with engine.model.compute.encoding.hold("another"):  # so no chunk is encoded
            background.add(tuple(Q))
            until(lambda: background._current is not None)  # the thread has taken it
            background.add(tuple(A))
            waiting = begin(lambda: background.encode_first([tuple(A)], lambda: None))
            until(lambda: bool(background._wanted))
            for chunk in (B, C):
                background.add(tuple(chunk))
        waiting.join(60)
        background.flush()
        assert [stored(engine, one) is not None for one in (A, B, C)] == [True, False, True]

    def test_nobody_waits_for_a_thread_that_an_error_ended(
        self, engine: Engine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        broken = raising(RuntimeError("a pool that cannot be released"))
        monkeypatch.setattr(background_module, "openmp", SimpleNamespace(release_threads=broken))
        background = engine.entries.background
        background.add(tuple(A))
        until(lambda: background._thread is None)
        monkeypatch.undo()
        for wait in (background.flush, lambda: background.settle(Claim(deadline_s=60.0))):
            waiting = begin(wait)
            waiting.join(30)
            assert not waiting.is_alive()
        assert not background.encode_first([tuple(A)], lambda: None)

    def test_of_too_many_missed_chunks_the_oldest_stays_a_miss_and_the_log_says_how_many(
        self, engine: Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setattr(background_module, "MOST_WAITING", 2)
        background = engine.entries.background
        with engine.parts.scheduler.request():  # background encoding waits
            for chunk in (A, B, C):
                background.add(tuple(chunk))
        background.flush()
        assert [stored(engine, one) is not None for one in (A, B, C)] == [False, True, True]
        assert "1 chunks were dropped" in caplog.text
