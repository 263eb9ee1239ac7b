"""Work of a task in a thread: the same events, an event loop that goes on, and cancellation that
ends the request.
"""

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing
from typing import Any

import pytest

from ragkv import Answer, Engine, Session
from ragkv.errors import InputError
from ragkv.runtime.thread_stream import iterate_in_thread, run_in_thread
from tests.engine.helpers import A, B, Q, engine_of
from tests.faults import at_each_layer
from tests.scheduling.helpers import until

LONG: dict[str, Any] = dict(max_new_tokens=400, min_new_tokens=400)


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with engine_of() as engine:
        engine.entries.encode([A, B])
        yield engine


async def answer(engine: Engine, session: Session | None = None, **options: Any) -> Answer:
    return await run_in_thread(
        lambda cancel: engine.answer(Q, [A, B], session, cancel=cancel, **options)
    )


def stream(engine: Engine, **options: Any) -> AsyncIterator[Any]:
    return iterate_in_thread(lambda cancel: engine.stream(Q, [A, B], cancel=cancel, **options))  # type: ignore[arg-type,return-value]


def test_a_tasks_events_are_those_of_a_thread(engine: Engine) -> None:
    async def events() -> list[Any]:
        return [event async for event in stream(engine, max_new_tokens=8)]

    wanted = list(engine.stream(Q, [A, B], max_new_tokens=8))
    assert [getattr(event, "token_id", None) for event in asyncio.run(events())] == [
        getattr(event, "token_id", None) for event in wanted
    ]


def test_the_event_loop_goes_on_while_the_model_works(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    inside = threading.Event()
    went_on = threading.Event()

    def wait_for_the_loop(_: int) -> None:
        inside.set()
        assert went_on.wait(60)

    async def work() -> None:
        task = asyncio.create_task(answer(engine, max_new_tokens=2))
        while not inside.is_set():
            await asyncio.sleep(0.001)
        went_on.set()  # otherwise the model would wait for it in vain
        await task

    at_each_layer(monkeypatch, wait_for_the_loop)
    asyncio.run(work())


def test_a_cancelled_task_cancels_its_request_and_the_session_is_as_it_was(engine: Engine) -> None:
    session = engine.session("cancelled")

    async def cancelled() -> None:
        task = asyncio.create_task(answer(engine, session, **LONG))
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancelled())
    until(lambda: not engine.parts.idle_time.busy)
    assert session.turns == 0


def test_a_stream_that_is_closed_early_ends_its_request(engine: Engine) -> None:
    async def first() -> Any:
        async with aclosing(stream(engine, **LONG)) as events:  # type: ignore[type-var]
            return await anext(events)

    assert asyncio.run(first()).token_id >= 0
    until(lambda: not engine.parts.idle_time.busy)


def test_an_error_of_the_request_is_raised_in_the_task(engine: Engine) -> None:
    with pytest.raises(InputError, match="temperature is 9"):
        asyncio.run(answer(engine, temperature=9.0))
