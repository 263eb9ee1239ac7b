"""Many threads on one engine: every thread gets the result that it would get alone."""

import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ragkv import Engine, RagKVError, StoreConfig
from tests import tiny_models
from tests.scheduling.helpers import begin, together

from .helpers import A, B, C, Q, engine_of, stored

CHUNKS = [A, B, C]
ORDERS = [[A, B, C], [C, B, A], [B, A], [A, A], [C], [], [B, C, B], [A, C]]
QUESTIONS = [tiny_models.tokens(3, seed) for seed in range(30, 38)]


@pytest.mark.parametrize("memory_bytes", [10**6, 0], ids=["memory", "disk"])
def test_eight_threads_get_their_solo_results(tmp_path: Path, memory_bytes: int) -> None:
    with engine_of(store=StoreConfig(directory=str(tmp_path), memory_bytes=memory_bytes)) as engine:
        engine.entries.encode(CHUNKS)

        prefills = [
            lambda q=q, chunks=chunks: engine.prefill(q, chunks, ratio=0.3).logits
            for q, chunks in zip(QUESTIONS, ORDERS, strict=True)
        ]
        alone = [call() for call in prefills]
        # prompts that waited shared a pass
        for shared, own in zip(together(prefills), alone, strict=True):
            torch.testing.assert_close(shared, own, rtol=0.0, atol=1e-5 * float(own.abs().max()))


def test_threads_that_miss_warm_and_delete_at_the_same_time_get_complete_answers(
    engine: Engine,
) -> None:
    alone = engine.answer(Q, CHUNKS, ratio=1.0, max_new_tokens=4).token_ids
    calls: list[Callable[[], Any]] = [
        lambda: engine.answer(Q, CHUNKS, ratio=1.0, max_new_tokens=4)
    ] * 5
    results = together(
        [*calls, lambda: engine.entries.encode(CHUNKS), lambda: engine.entries.delete([A, B])]
    )
    assert all(answer.token_ids == alone for answer in results[:5])


def test_streams_of_one_thread_may_be_interleaved(engine: Engine) -> None:
    engine.entries.encode(CHUNKS)
    how: dict[str, Any] = dict(max_new_tokens=5, min_new_tokens=5, ratio=0.3)
    alone = [engine.answer(Q, order, **how).token_ids for order in ORDERS[:2]]
    streams = [engine.stream(Q, order, **how) for order in ORDERS[:2]]
    *_, last = zip(*streams, strict=True)
    assert [answer.token_ids for answer in last] == alone


def test_flush_and_close_do_not_wait_for_an_abandoned_stream() -> None:
    engine = engine_of()
    events = engine.stream(Q, [A], max_new_tokens=20, min_new_tokens=20)
    next(events)
    done = begin(lambda: (engine.flush(), engine.close()))
    done.join(60)
    assert not done.is_alive()
    assert len(list(events)) == 20  # the stream itself goes on: what it needs is its own


class TestClosing:
    def test_closing_ends_background_encoding(self, monkeypatch: pytest.MonkeyPatch) -> None:
        before = set(threading.enumerate())
        engine = engine_of()
        started = threading.Event()
        original = engine.entries.encoder.chunks

        def chunks(*wanted: Any) -> Any:
            started.set()
            return original(*wanted)

        monkeypatch.setattr(engine.entries.encoder, "chunks", chunks)
        engine.prefill(Q, CHUNKS)
        assert started.wait(60)
        engine.close()
        assert set(threading.enumerate()) <= before

    def test_closing_while_threads_ask_gives_answers_or_one_clear_error(self) -> None:
        engine = engine_of()
        engine.entries.encode(CHUNKS)
        wanted = engine.prefill(Q, CHUNKS).logits

        def ask() -> None:
            with pytest.raises(RagKVError, match="closed"):
                while True:
                    assert torch.equal(engine.prefill(Q, CHUNKS).logits, wanted)

        together([ask, ask, ask, engine.close])


def test_requests_go_before_background_encoding(engine: Engine) -> None:
    with engine.parts.scheduler.request():
        engine.prefill(Q, [A])
        engine.prefill(Q, [B])
        assert stored(engine, A) is None
    engine.flush()
    assert stored(engine, A) is not None


def test_a_process_that_does_not_close_its_engine_ends_cleanly() -> None:
    script = (
        "from ragkv import Engine\n"
        "from tests import tiny_models as tiny\n"
        "Engine(tiny.model('llama')).answer([5, 6], [tiny.tokens(60, seed) for seed in "
        "range(6)], max_new_tokens=1)\n"
        "print('answered')\n"
    )
    ran = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False
    )
    assert (ran.returncode, ran.stdout.split()[-1]) == (0, "answered"), ran.stderr
