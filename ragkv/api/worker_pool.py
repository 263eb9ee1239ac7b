"""Blocking work for an event loop that must not block: bounded thread pools, and streams from a thread to the loop.

A pool accepts a fixed number of work items, runs each on its own thread, and refuses the next item immediately, so no
request waits where the engine's scheduler does not see it. The thread of a stream pauses when it is `AHEAD` items ahead
of the reader, so a slow reader delays only itself. When the client disconnects, `cancelled` is set, and the work stops
at the next token, layer or poll.
"""

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Generic, TypeVar

from starlette.requests import Request

from ragkv.errors import DeadlineError
from ragkv.runtime import openmp

from .errors import CLIENT_GONE, ApiError

T = TypeVar("T")

AHEAD = 64  # items that a stream's thread may be ahead of the reader


class WorkContext:
    """The request that a piece of work serves, its deadline, and whether it is cancelled."""

    def __init__(self, request: Request, deadline_s: float | None) -> None:
        """`deadline_s` counts from now; `None`: no deadline."""
        self.request = request
        self.cancelled = threading.Event()  # set once the result is no longer needed
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


class WorkerPool:
    """Accepts up to `limit` pieces of work at once. Call its methods on the event loop's thread."""

    def __init__(self, name: str, limit: int, deadline_s: float | None, threads: int | None = None) -> None:
        """`threads` of the accepted pieces of work run at once; `None`: all of them."""
        self._pool = ThreadPoolExecutor(threads or limit, thread_name_prefix=f"ragkv-{name}")
        self._limit, self._deadline_s = limit, deadline_s
        self._lock = threading.Lock()
        self._running: set[WorkContext] = set()
        self._closed = False

    @property
    def running(self) -> int:
        """Pieces of work that are accepted and not finished."""
        with self._lock:
            return len(self._running)

    async def run(self, request: Request, work: Callable[[WorkContext], T]) -> T:
        """Return what `work` returns; cancel it when the client of `request` disconnects."""
        context, future = self._submit(request, work)
        outcome = asyncio.wrap_future(future)
        try:
            return await unless_disconnected(request, outcome)
        finally:
            context.cancelled.set()
            outcome.add_done_callback(consume_exception)

    async def run_stream(
        self, request: Request, work: Callable[[WorkContext], Generator[object, None, None]], kind: type[T]
    ) -> T:
        """Run the stream of `work` to its end; return its last item, which is a `kind`."""

        def last(context: WorkContext) -> T:
            *_, item = work(context)
            assert isinstance(item, kind)
            return item

        return await self.run(request, last)

    async def stream(
        self, request: Request, work: Callable[[WorkContext], Generator[T, None, None]]
    ) -> AsyncGenerator[T, None]:
        """The items that `work` yields. Closing the stream ends the work.

        Returns when the first item is there, so that an error before it can still be answered with its own status.
        """
        items = self._items(request, work)
        first = asyncio.ensure_future(anext(items))
        try:
            item = await unless_disconnected(request, first)
        except BaseException:
            first.cancel()
            await asyncio.wait({first})
            await items.aclose()
            raise

        async def all_items() -> AsyncGenerator[T, None]:
            async with contextlib.aclosing(items):
                yield item
                async for later in items:
                    yield later

        return all_items()

    def close(self) -> None:
        """Cancel what is running and wait until it has ended. Blocks."""
        self._closed = True
        with self._lock:
            running = list(self._running)
        for context in running:
            context.cancelled.set()
        self._pool.shutdown()

    async def _items(
        self, request: Request, work: Callable[[WorkContext], Generator[T, None, None]]
    ) -> AsyncGenerator[T, None]:
        channel: _Channel[T] = _Channel(asyncio.get_running_loop())

        def drain(context: WorkContext) -> None:
            try:
                with contextlib.closing(work(context)) as items:
                    for item in items:
                        if not channel.put(item, context):
                            break
                channel.send(None)
            except BaseException as error:
                channel.send(error)

        context, _ = self._submit(request, drain)
        try:
            async for item in channel:
                yield item
        finally:
            context.cancelled.set()
            channel.stop_reading()

    def _submit(self, request: Request, work: Callable[[WorkContext], T]) -> "tuple[WorkContext, Future[T]]":
        """Start `work`; raises `ApiError` 503 if the pool is full or closed."""
        context = WorkContext(request, self._deadline_s)
        with self._lock:
            if self._closed:
                raise ApiError(503, "The server is shutting down. Ask again.", "shutting_down", retry_after_s=5)
            if len(self._running) >= self._limit:
                raise ApiError(
                    503, f"{self._limit} requests are running already; ask again.", "queue_full", retry_after_s=1
                )
            self._running.add(context)
        try:
            future = self._pool.submit(_run_on_thread, work, context)
        except BaseException:
            self._finish(context)
            raise
        # Abandoned work counts too, until it has ended.
        future.add_done_callback(lambda _: self._finish(context))
        return context, future

    def _finish(self, context: WorkContext) -> None:
        with self._lock:
            self._running.discard(context)


class _Channel(Generic[T]):
    """A queue of at most `AHEAD` unread items from a thread to the event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._free = threading.Semaphore(AHEAD)
        self._items: asyncio.Queue[tuple[T] | BaseException | None] = asyncio.Queue()

    def put(self, item: T, context: WorkContext) -> bool:
        """Wait for a free place and add `item`; `False` if the reader has stopped. Raises `DeadlineError`."""
        while not self._free.acquire(timeout=context.remaining_s):
            pass  # `remaining_s` raises after the deadline
        return not context.cancelled.is_set() and self.send((item,))

    def stop_reading(self) -> None:
        """Wake a thread that waits for a free place, so that it sees `cancelled`."""
        self._free.release()

    def send(self, item: tuple[T] | BaseException | None) -> bool:
        """Add an item, or end the stream: with an error, or with `None`. `False` if the loop is closed."""
        try:
            self._loop.call_soon_threadsafe(self._items.put_nowait, item)
        except RuntimeError:
            return False
        return True

    async def __aiter__(self) -> AsyncIterator[T]:
        while (item := await self._items.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            self._free.release()
            yield item[0]


async def unless_disconnected(request: Request, outcome: "asyncio.Future[T]") -> T:
    """The result of `outcome`; raises `ApiError` 499 if the client disconnects first. The body must be read already."""

    async def disconnect() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    watcher = asyncio.ensure_future(disconnect())
    try:
        waiting: list[asyncio.Future[Any]] = [outcome, watcher]
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        if not outcome.done():
            raise ApiError(CLIENT_GONE, "The client closed the connection.")
        return outcome.result()
    finally:
        watcher.cancel()
        with contextlib.suppress(asyncio.CancelledError, Exception):
            await watcher


def _run_on_thread(work: Callable[[WorkContext], T], context: WorkContext) -> T:
    try:
        return work(context)
    finally:
        openmp.release_threads()


def consume_exception(outcome: "asyncio.Future[Any]") -> None:
    """Read the exception of an abandoned future, so that asyncio does not report it as never retrieved."""
    if not outcome.cancelled():
        outcome.exception()
