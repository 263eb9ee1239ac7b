"""Work on threads: shared by the tenants, cancelled with its request, and giving way to answers."""

import asyncio
import contextlib
import gc
import threading
import time
from collections.abc import Generator
from typing import Any

import pytest
from starlette.requests import ClientDisconnect, Request

from ragkv.api.errors import ApiError
from ragkv.api.keys import Principal
from ragkv.api.settings import QueueConfig
from ragkv.api.sse import Stream
from ragkv.api.work import (
    BURST,
    FREE_S,
    PAUSE_S,
    PAUSE_SHARE,
    RequestPool,
    TenantLimiter,
    pausing_check,
)
from ragkv.errors import CancelledError, DeadlineError
from ragkv.runtime import Claim

QUEUE = QueueConfig(limit=20, tenant_limit=3)


def request_of(tenant: str, left: asyncio.Event | None = None) -> Request:
    """A request whose client stays until `left` is set."""

    async def receive() -> Any:
        await (left or asyncio.Event()).wait()
        return {"type": "http.disconnect"}

    principal = Principal(key_id=tenant, name=tenant, tenant=tenant)
    return Request({"type": "http", "state": {"principal": principal}}, receive)


async def until(true: Any) -> None:
    ends = time.monotonic() + 20
    while not true():
        assert time.monotonic() < ends
        await asyncio.sleep(0.01)


async def test_cutting_ends_waiting_running_and_streaming_work_with_503() -> None:
    pool = RequestPool(QUEUE, 2, 1, None)

    def work(claim: Claim) -> None:
        while True:
            claim.check()
            time.sleep(0.01)

    def endless(_: Claim) -> Generator[int, None, None]:
        yield from iter(int, 1)

    stream = await pool.stream(request_of("b"), endless)
    tasks = [asyncio.ensure_future(pool.run(request_of("a"), work)) for _ in range(2)]
    await until(lambda: len(pool.computing) == 2)
    assert await asyncio.to_thread(pool.close, 5.0)
    for ending in (*tasks, asyncio.ensure_future(_read(stream))):
        with pytest.raises(ApiError, match="shutting down") as raised:
            await ending
        assert raised.value.status == 503
    with pytest.raises(ApiError, match="shutting down"):
        await pool.run(request_of("c"), work)


@pytest.mark.parametrize("read", [0, 1], ids=["unread", "read"])
async def test_closing_a_stream_ends_its_work(read: int) -> None:
    pool = RequestPool(QUEUE, 2, 1, None)
    ended = threading.Event()

    def endless(_: Claim) -> Generator[int, None, None]:
        try:
            yield from iter(int, 1)
        finally:
            ended.set()

    stream = await pool.stream(request_of("a"), endless)
    for _ in range(read):
        assert await anext(stream) == 0
    stream.close()
    await until(lambda: ended.is_set() and not pool.accepted)
    assert stream is not None, "it was closed, not collected"


@pytest.mark.parametrize("leaves", ["at once", "before the head"])
async def test_a_client_that_leaves_before_the_first_item_ends_the_work(leaves: str) -> None:
    pool = RequestPool(QUEUE, 2, 1, None)

    def endless(_: Claim) -> Generator[int, None, None]:
        yield from iter(int, 1)

    response = Stream(
        await pool.stream(request_of("a"), endless),
        lambda item: [str(item)],
        lambda error: error.message,
    )

    async def receive() -> Any:
        if leaves == "before the head":
            await asyncio.Event().wait()
        return {"type": "http.disconnect"}

    async def send(_: Any) -> None:
        raise OSError("the client is gone")

    version = "2.4" if leaves == "before the head" else "2.3"
    scope = {"type": "http", "asgi": {"spec_version": version}}
    with contextlib.suppress(ClientDisconnect, OSError):
        await response(scope, receive, send)
    await until(lambda: not pool.accepted)
    assert response is not None, "it was closed, not collected"


async def test_a_tenant_above_its_limit_gets_429_and_leaves_threads_to_others() -> None:
    pool = RequestPool(QUEUE, 2, 1, None)
    ended = threading.Event()
    tasks = [
        asyncio.ensure_future(pool.run(request_of("a"), lambda _: ended.wait(60))) for _ in range(3)
    ]
    await until(lambda: len(pool.accepted) == 3)
    with pytest.raises(ApiError, match=r"queue\.tenant_limit") as raised:
        await pool.run(request_of("a"), lambda _: None)
    assert (raised.value.status, raised.value.code) == (
        429,
        "tenant_queue_full",
    ) and raised.value.retry_after_s
    assert await pool.run(request_of("b"), lambda _: 7) == 7
    ended.set()
    assert await asyncio.gather(*tasks) == [True] * 3


async def test_the_deadline_ends_work_that_still_waits_for_a_thread() -> None:
    pool = RequestPool(QUEUE, 1, 1, 0.2)
    ended = threading.Event()
    running = asyncio.ensure_future(pool.run(request_of("a"), lambda _: ended.wait(60)))
    await until(lambda: pool.computing)
    with pytest.raises(DeadlineError, match=r"deadline of 0\.2 s"):
        await asyncio.wait_for(pool.run(request_of("b"), lambda _: None), 30)
    ended.set()
    assert await running


async def test_a_body_that_is_too_large_where_nobody_reads_it_ends_the_work_without_a_word(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def receive() -> Any:
        raise ApiError(413, "too large")

    request = Request(request_of("a").scope, receive)
    pool = RequestPool(QUEUE, 2, 1, None)

    def work(claim: Claim) -> None:
        until_over(claim)
        claim.check()

    with pytest.raises(CancelledError):
        await pool.run(request, work)
    gc.collect()  # an error that nobody read would be told now
    assert caplog.text == "" and not pool.accepted


def until_over(claim: Claim) -> None:
    ends = time.monotonic() + 20
    while not claim.is_over:
        assert time.monotonic() < ends
        time.sleep(0.01)


async def _read(stream: Any) -> None:
    async for _ in stream:
        pass


async def test_memory_is_released_after_a_burst(monkeypatch: pytest.MonkeyPatch) -> None:
    released = list[int]()
    monkeypatch.setattr("ragkv.api.work.release_memory", lambda: released.append(1))
    pool = RequestPool(QueueConfig(limit=20), 16, 16, None)
    await pool.run(request_of("a"), lambda _: None)
    assert released == []
    await asyncio.gather(*(pool.run(request_of("a"), lambda _: None) for _ in range(BURST)))
    await until(lambda: released == [1])


async def test_places_go_to_waiting_tenants_and_a_cancelled_one_takes_none() -> None:
    limiter = TenantLimiter(1, 1)
    async with limiter.hold("a"):
        waiting = asyncio.ensure_future(limiter.hold("b").__aenter__())
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait({waiting})
    async with asyncio.timeout(1), limiter.hold("c"):
        pass


async def test_long_work_on_data_pauses_by_what_its_last_batch_computed_and_how_many_requests_work() -> (
    None
):
    pauses = list[float]()
    check = pausing_check(Claim("a"), lambda seconds, _: pauses.append(seconds), lambda: 2)
    check()  # nothing is computed yet
    _compute(FREE_S / 2)
    check()  # a search makes no pause
    assert pauses == []
    _compute(FREE_S / 2)
    check()
    pauses.clear()
    _compute(0.03)
    check()
    _compute(10 * PAUSE_S / PAUSE_SHARE / 20)
    check()
    assert len(pauses) == 2 and 0.03 * PAUSE_SHARE * 2 <= pauses[0] <= PAUSE_S == pauses[1]


def _compute(seconds: float) -> None:
    ends = time.thread_time() + seconds
    while time.thread_time() < ends:
        pass
