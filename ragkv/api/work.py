"""Blocking work for a server that does not block: a bounded number of threads, and streams handed over to the loop.

A desk takes so many pieces of work at once, each on a thread of its own, and refuses the next at once, so nothing waits
without the engine's scheduler knowing. A stream's thread waits for who reads it when it is so many events ahead; who
reads slowly holds up nobody else. Who vanishes sets `left`, and the work ends at the next token, layer or poll.
"""

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from starlette.requests import Request

from ragkv.errors import DeadlineError
from ragkv.runtime import openmp

from .errors import CLIENT_GONE, ApiError

T = TypeVar("T")

AHEAD = 64  # events a stream may be ahead of who reads it


@dataclass(frozen=True, slots=True)
class DeskStats:
    """A desk now."""

    working: int  # pieces of work taken in and not done
    limit: int
    refused: int  # since it was opened


class Call:
    """One request's patience, as the work sees it."""

    def __init__(self, deadline_s: float | None) -> None:
        self.left = threading.Event()  # set once nobody waits for the outcome
        self._ends = None if deadline_s is None else time.monotonic() + deadline_s
        self._deadline_s = deadline_s

    @property
    def remaining_s(self) -> float | None:
        """Seconds until the deadline; raises `DeadlineError` if it passed."""
        if self._ends is None:
            return None
        if (remaining := self._ends - time.monotonic()) <= 0:
            raise DeadlineError(f"The request's deadline of {self._deadline_s:g} s passed; ask for less, or ask again.")
        return remaining


class Desk:
    """Takes work in, so much at once. All methods are for the event loop's thread, but for the work itself."""

    def __init__(self, name: str, limit: int, deadline_s: float | None, threads: int | None = None) -> None:
        """`limit` pieces of work are taken in, `threads` of them (all, if left out) done at once."""
        self._pool = ThreadPoolExecutor(threads or limit, thread_name_prefix=f"ragkv-{name}")
        self._limit, self._deadline_s = limit, deadline_s
        self._lock = threading.Lock()
        self._calls: set[Call] = set()
        self._refused = 0
        self._closed = False

    async def run(self, request: Request, work: Callable[[Call], T]) -> T:
        """What `work` returns; called off once the client of `request` is gone."""
        async with _Watched(request) as gone:
            call, future = self._begin(work)
            outcome = asyncio.wrap_future(future)
            try:
                both: list[asyncio.Future[Any]] = [outcome, gone]
                await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
                if outcome.done():
                    return outcome.result()
                raise ApiError(CLIENT_GONE, "The client closed the connection.")
            finally:
                call.left.set()
                outcome.add_done_callback(_looked_at)

    async def stream(self, work: Callable[[Call], Generator[T, None, None]]) -> AsyncGenerator[T, None]:
        """What `work` yields, as it comes. Close it, and the work ends too."""
        channel: _Channel[T] = _Channel(asyncio.get_running_loop())

        def drain(call: Call) -> None:
            try:
                with contextlib.closing(work(call)) as items:
                    for item in items:
                        if not channel.put(item, call):
                            break
                channel.end(None)
            except BaseException as error:
                channel.end(error)

        call, _ = self._begin(drain)
        try:
            async for item in channel:
                yield item
        finally:
            call.left.set()
            channel.leave()

    def stats(self) -> DeskStats:
        """How much there is to do."""
        with self._lock:
            return DeskStats(len(self._calls), self._limit, self._refused)

    def close(self) -> None:
        """Call off what is under way and wait for it to end. Blocks."""
        self._closed = True
        with self._lock:
            calls = list(self._calls)
        for call in calls:
            call.left.set()
        self._pool.shutdown()

    def _begin(self, work: Callable[[Call], T]) -> tuple[Call, "Future[T]"]:
        call = Call(self._deadline_s)
        with self._lock:
            if self._closed:
                raise ApiError(503, "The server is shutting down. Ask again.", code="shutting_down", retry_after_s=5)
            if len(self._calls) >= self._limit:
                self._refused += 1
                raise ApiError(
                    503, f"{self._limit} requests are under way already; ask again.", code="queue_full", retry_after_s=1
                )
            self._calls.add(call)
        try:
            future = self._pool.submit(_work, work, call)
        except BaseException:
            self._done(call)
            raise
        future.add_done_callback(lambda _: self._done(call))  # when it has ended, not when nobody waits any more
        return call, future

    def _done(self, call: Call) -> None:
        with self._lock:
            self._calls.discard(call)


class _Channel(Generic[T]):
    """From a thread to the loop, with room for `AHEAD` items."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._room = threading.Semaphore(AHEAD)
        self._items: asyncio.Queue[tuple[T] | BaseException | None] = asyncio.Queue()

    def put(self, item: T, call: Call) -> bool:
        """Hand `item` over once there is room; `False` if nobody wants it. Raises `DeadlineError`."""
        while not self._room.acquire(timeout=call.remaining_s):
            pass  # `remaining_s` raises
        return not call.left.is_set() and self._put((item,))

    def end(self, error: BaseException | None) -> None:
        """That was all."""
        self._put(error)

    def leave(self) -> None:
        """Nobody reads any more: let who waits for room see it."""
        self._room.release()

    def _put(self, item: tuple[T] | BaseException | None) -> bool:
        try:
            self._loop.call_soon_threadsafe(self._items.put_nowait, item)
        except RuntimeError:  # the loop is closed
            return False
        return True

    async def __aiter__(self) -> AsyncIterator[T]:
        while (item := await self._items.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            self._room.release()
            yield item[0]


class _Watched:
    """A task that ends when the client of a request whose body was read is gone."""

    def __init__(self, request: Request) -> None:
        self._request = request

    async def _gone(self) -> None:
        while (await self._request.receive())["type"] != "http.disconnect":
            pass

    async def __aenter__(self) -> "asyncio.Task[None]":
        self._task = asyncio.ensure_future(self._gone())
        return self._task

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError, Exception):
            await self._task


def _work(work: Callable[[Call], T], call: Call) -> T:
    try:
        return work(call)
    finally:
        openmp.release_threads()


def _looked_at(outcome: "asyncio.Future[Any]") -> None:
    """An error nobody waits for is nobody's."""
    if not outcome.cancelled():
        outcome.exception()


async def started(request: Request, items: AsyncGenerator[T, None]) -> AsyncGenerator[T, None]:
    """`items`, once the first is there: what fails before it can still be answered with a status of its own."""
    async with _Watched(request) as gone:
        first = asyncio.ensure_future(anext(items))
        try:
            await asyncio.wait({first, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not first.done():
                raise ApiError(CLIENT_GONE, "The client closed the connection.")
            item = first.result()
        except BaseException:
            first.cancel()
            await asyncio.wait({first})
            await items.aclose()
            raise

    async def all_of_it() -> AsyncGenerator[T, None]:
        async with contextlib.aclosing(items):
            yield item
            async for later in items:
                yield later

    return all_of_it()


__all__ = ["Call", "Desk", "DeskStats", "started"]
