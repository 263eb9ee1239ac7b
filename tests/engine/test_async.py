"""Answers for tasks: the same events, an event loop that goes on, and cancellation that ends the request."""

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import aclosing
from typing import Any

import pytest
import torch

from ragkv import Answer, Engine
from ragkv.errors import CancelledError, InputError
from ragkv.model import PASS_ROWS

from .helpers import A, B, C, Q, engine_of

LONG: dict[str, Any] = dict(max_new_tokens=400, min_new_tokens=400)


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with engine_of() as engine:
        engine.warm([A, B])
        yield engine


def wait_until_idle(engine: Engine) -> None:
    ends = time.monotonic() + 20
    while engine.parts.scheduler.busy:
        assert time.monotonic() < ends, "the request did not end"
        time.sleep(0.01)


def test_a_tasks_answer_and_events_are_those_of_a_thread(engine: Engine) -> None:
    async def both() -> tuple[Answer, list[Any]]:
        answer = await engine.aanswer(Q, [A, B], max_new_tokens=8)
        return answer, [event async for event in engine.astream(Q, [A, B], max_new_tokens=8)]

    answer, events = asyncio.run(both())
    wanted = list(engine.stream(Q, [A, B], max_new_tokens=8))
    assert [getattr(event, "token_id", None) for event in events] == [getattr(e, "token_id", None) for e in wanted]
    assert answer.token_ids == events[-1].token_ids == wanted[-1].token_ids  # type: ignore[union-attr]


def test_one_thread_runs_a_whole_request(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[str] = []
    original = threading.Thread.start
    monkeypatch.setattr(threading.Thread, "start", lambda thread: (started.append(thread.name), original(thread))[1])
    asyncio.run(engine.aanswer(Q, [A], max_new_tokens=20, min_new_tokens=20))
    assert started.count("ragkv-stream") == 1 and len(started) <= 2


def test_the_event_loop_goes_on_while_the_model_works(engine: Engine) -> None:
    async def ticks() -> int:
        count = 0
        task = asyncio.create_task(engine.aanswer(Q, [A], max_new_tokens=100, min_new_tokens=100))
        while not task.done():
            count += 1
            await asyncio.sleep(0.001)
        return count

    assert asyncio.run(ticks()) > 5


def test_a_cancelled_task_cancels_its_request_and_the_session_is_as_it_was(engine: Engine) -> None:
    session = engine.session("cancelled")

    async def cancelled() -> None:
        task = asyncio.create_task(engine.aanswer(Q, [A], session, **LONG))
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancelled())
    wait_until_idle(engine)
    assert session.turns == 0


def test_a_stream_that_is_closed_early_ends_its_request(engine: Engine) -> None:
    async def first() -> Any:
        async with aclosing(engine.astream(Q, [A], **LONG)) as events:
            return await anext(events)

    assert asyncio.run(first()).token_id >= 0
    wait_until_idle(engine)


def test_an_error_of_the_request_is_raised_in_the_task(engine: Engine) -> None:
    with pytest.raises(InputError, match="temperature is 9"):
        asyncio.run(engine.aanswer(Q, [A], temperature=9.0))


def test_a_tasks_prefill_is_that_of_a_thread_and_leaves_the_session_alone(engine: Engine) -> None:
    session = engine.session("prefilled")
    made = asyncio.run(engine.aprefill(Q, [A, B], session))
    assert torch.equal(made.logits, engine.prefill(Q, [A, B]).logits) and session.turns == 0


def test_a_cancelled_prefill_ends_before_its_next_layer(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    began, ended = threading.Event(), list[BaseException]()

    def stuck(*_: Any, cancel: threading.Event, **__: Any) -> Any:
        began.set()
        assert cancel.wait(20)
        ended.append(CancelledError("the request was cancelled"))
        raise ended[0]

    monkeypatch.setattr(engine, "prefill", stuck)

    async def cancelled() -> None:
        task = asyncio.create_task(engine.aprefill(Q, [A]))
        await asyncio.to_thread(began.wait, 20)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancelled())
    ends = time.monotonic() + 20
    while not ended:
        assert time.monotonic() < ends, "the prefill was not cancelled"
        time.sleep(0.01)


def test_a_task_warms_chunks_on_one_thread() -> None:
    with engine_of() as engine:
        done: list[tuple[int, int]] = []
        report = asyncio.run(engine.awarm([A, B, A], lambda *count: done.append(count)))
        assert (report.encoded, report.present, done[-1]) == (2, 0, (2, 2))
        assert asyncio.run(engine.awarm([A, B])).present == 2


def test_a_cancelled_warming_ends_before_the_next_batch_and_keeps_what_it_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PASS_ROWS, "cpu", 1)  # a batch is one chunk
    with engine_of() as engine:
        first, go_on = threading.Event(), threading.Event()

        def progress(*_: int) -> None:
            first.set()
            assert go_on.wait(20)

        async def cancelled() -> None:
            task = asyncio.create_task(engine.awarm([A, B, C], progress))
            await asyncio.to_thread(first.wait, 20)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            go_on.set()

        asyncio.run(cancelled())
        wait_until_idle(engine)
        assert engine.warm([A]).present == 1
        assert engine.warm([B, C]).encoded == 2
