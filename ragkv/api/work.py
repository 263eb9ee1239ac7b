"""Blocking work for an event loop that must not block: anyio's threads, a limiter for each tenant,
and streams.

A pool accepts a bounded number of work items, in all and of one tenant, and refuses the next one
immediately. One tenant holds at most a share of the threads; the one fair queue, by time, is at the
model (`scheduling/`). The thread of a stream pauses when it is `AHEAD` items ahead of the reader,
so a slow reader delays only itself. When the client disconnects, its work is cancelled: it stops at
the next token, layer, batch or poll.
"""

import asyncio
import contextlib
import math
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Generator
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from anyio import CapacityLimiter, to_thread
from starlette.requests import Request

from ragkv.errors import CancelledError, DeadlineError
from ragkv.runtime import Check, PausingCheck, openmp, release_memory
from ragkv.runtime.thread_stream import Channel

from .errors import CLIENT_GONE, ApiError
from .settings import QueueConfig

T = TypeVar("T")
WaitIdle = Callable[[float, Callable[[], bool]], None]

AHEAD = 64  # items that a stream's thread may be ahead of the reader
BURST = 8  # jobs at once after which freed memory is given back, when none is left ...
RELEASE_S = 60.0  # ... and the time after which a server that is never idle gives it back
BATCH_S = 0.01  # Less computing than this is not worth a pause.
FREE_S = 0.2  # A task that computes less than this in all, such as a search, makes no pause.
# A task waits at most this many times what its last batch computed, for each task that runs ...
PAUSE_SHARE = 4.0
PAUSE_S = 0.5  # ... and no longer than this, so that a cancelled one ends soon.


class WorkContext:
    """The request that a piece of work serves, its deadline, and whether it is cancelled."""

    def __init__(self, request: Request, deadline_s: float | None) -> None:
        """`deadline_s` counts from now; `None`: no deadline."""
        self.request = request
        self.cancelled = threading.Event()  # set once the result is no longer needed
        self.has_begun = False  # whether it has a thread
        self.shutting_down = False  # whether it was the server that cancelled the work
        self._ends = None if deadline_s is None else time.monotonic() + deadline_s
        self._deadline_s = deadline_s

    @property
    def tenant(self) -> str:
        """The tenant of the request's key; "" without keys."""
        return str(self.request.state.principal.tenant)

    @property
    def remaining_s(self) -> float | None:
        """Seconds until the deadline; raises `DeadlineError` if it passed."""
        if self._ends is None:
            return None
        if (remaining := self._ends - time.monotonic()) <= 0:
            raise DeadlineError(
                f"The request's deadline of {self._deadline_s:g} s passed; ask for less, or ask "
                "again."
            )
        return remaining

    def check(self) -> None:
        """Raise `CancelledError` or `DeadlineError` if the work should end. Long work calls it
        between batches.
        """
        if self.cancelled.is_set():
            raise CancelledError("The request was cancelled.")
        self.remaining_s  # noqa: B018 - raises


def giving_way(context: WorkContext, wait_idle: WaitIdle, tasks: Callable[[], int]) -> Check:
    """What a task calls before each batch, on its own thread: it pauses while answers run, and
    raises as `context`.

    `wait_idle` waits while answers run (`Scheduler.wait_idle`), `tasks` tells how many tasks run.
    So all tasks together take about a fifth of a core from answers, and each still comes to an end.
    """
    began = resumed = time.thread_time()

    def check() -> None:
        nonlocal resumed
        context.check()
        computed_s = time.thread_time() - resumed
        if computed_s < BATCH_S or time.thread_time() - began < FREE_S:
            return
        openmp.release_threads()
        wait_idle(min(PAUSE_S, PAUSE_SHARE * computed_s * tasks()), context.cancelled.is_set)
        resumed = time.thread_time()
        context.check()

    return PausingCheck(check, context.check)


class TenantLimiter:
    """At most `total` holders at once, and `per_tenant` of one tenant. Without keys all are one,
    which may hold all.
    """

    def __init__(self, total: int, per_tenant: int) -> None:
        self._all = CapacityLimiter(total)
        self._per_tenant = per_tenant
        self._of_tenant: dict[str, CapacityLimiter] = {"": CapacityLimiter(total)}

    @asynccontextmanager
    async def hold(self, tenant: str) -> AsyncIterator[None]:
        """Hold one of them inside the block; waits until there is one. A task may hold one at a
        time.
        """
        limiter = self._of_tenant.setdefault(tenant, CapacityLimiter(self._per_tenant))
        async with limiter, self._all:
            yield


class WorkerPool:
    """Runs work on threads. Call `run`, `run_stream` and `stream` on the event loop's thread."""

    def __init__(
        self, queue: QueueConfig, threads: int, tenant_threads: int, deadline_s: float | None
    ) -> None:
        """So many run at once, of all tenants and of one with a key; `queue` says how many more are
        accepted.
        """
        self._queue = queue
        self._deadline_s = deadline_s
        self._limiter = TenantLimiter(threads, tenant_threads)
        self._threads = CapacityLimiter(math.inf)  # anyio's own bound would be a second one
        self.accepted: dict[WorkContext, asyncio.Task[Any]] = {}  # work that waits or runs
        self._computing: set[WorkContext] = set()  # work on a thread
        self._most = 0  # accepted work at once since memory was released
        self._released_at = time.monotonic()
        self._closed = False

    @property
    def computing(self) -> int:
        """Pieces of work that have a thread."""
        return len(self._computing)

    async def run(self, request: Request, work: Callable[[WorkContext], T]) -> T:
        """Return what `work` returns; cancel it when the client of `request` disconnects."""
        context, task = self._start(request, work)
        try:
            return await unless_disconnected(request, task)
        except asyncio.CancelledError:
            raise _shutting_down() if context.shutting_down else asyncio.CancelledError from None
        finally:
            self._abandon(context, task)

    async def run_stream(
        self,
        request: Request,
        work: Callable[[WorkContext], Generator[object, None, None]],
        kind: type[T],
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

        Returns when the first item is there, so that an error before it can still be answered with
        its own status.
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

    def cut(self) -> None:
        """Accept no more work and cancel what is accepted: what waits ends now, what runs ends at
        its next check.
        """
        self._closed = True
        for context, task in list(self.accepted.items()):
            context.shutting_down = True
            context.cancelled.set()
            if not context.has_begun:
                with contextlib.suppress(RuntimeError):  # the loop is closed
                    task.get_loop().call_soon_threadsafe(self._abandon, context, task)

    def close(self, timeout_s: float) -> bool:
        """Cancel what is running and wait until it has ended, for `timeout_s` at most; whether it
        has.
        """
        self.cut()
        ends = time.monotonic() + timeout_s
        while self._computing and time.monotonic() < ends:
            time.sleep(0.01)
        return not self._computing

    async def _items(
        self, request: Request, work: Callable[[WorkContext], Generator[T, None, None]]
    ) -> AsyncGenerator[T, None]:
        channel = Channel[T](AHEAD)

        def drain(context: WorkContext) -> None:
            with contextlib.closing(work(context)) as items:
                for item in items:
                    channel.put(item, context.check)
                    if context.cancelled.is_set():
                        context.check()

        context, task = self._start(request, drain)
        # The task is cancelled only while it waits for a thread.
        task.add_done_callback(
            lambda task: channel.end(_shutting_down() if task.cancelled() else task.exception())
        )
        try:
            async for item in channel:
                yield item
        finally:
            self._abandon(context, task)
            channel.stop_reading()

    def _start(
        self, request: Request, work: Callable[[WorkContext], T]
    ) -> "tuple[WorkContext, asyncio.Task[T]]":
        """Accept `work`; raises what `check_space` raises."""
        context = WorkContext(request, self._deadline_s)
        self.check_space(context.tenant)
        task = asyncio.get_running_loop().create_task(self._run(context, work))
        self.accepted[context] = task
        self._most = max(self._most, len(self.accepted))
        task.add_done_callback(lambda _: self._end(context, task))
        return context, task

    def check_space(self, tenant: str) -> None:
        """Raise `ApiError` if too much of the tenant's or of all tenants' work is accepted
        already.
        """
        mine = sum(context.tenant == tenant for context in self.accepted)
        if self._closed:
            raise _shutting_down()
        if tenant and mine >= self._queue.tenant_limit:
            message = (
                f"{mine} requests of this key's tenant run or wait: queue.tenant_limit "
                "allows no more. Ask again."
            )
            raise ApiError(429, message, "tenant_queue_full", retry_after_s=1)
        if len(self.accepted) >= self._queue.limit:
            message = (
                f"{len(self.accepted)} requests run or wait: the setting queue.limit "
                "allows no more. Ask again."
            )
            raise ApiError(503, message, "queue_full", retry_after_s=1)

    async def _run(self, context: WorkContext, work: Callable[[WorkContext], T]) -> T:
        async with self._limiter.hold(context.tenant):
            # from now on its task is not cancelled: it holds its place until the thread ends
            context.has_begun = True
            return await to_thread.run_sync(self._on_thread, context, work, limiter=self._threads)

    def _on_thread(self, context: WorkContext, work: Callable[[WorkContext], T]) -> T:
        self._computing.add(context)
        try:
            context.check()
            return work(context)
        except CancelledError as error:
            if context.shutting_down:
                raise _shutting_down() from error
            raise
        finally:
            openmp.release_threads()
            self._computing.discard(context)

    def _abandon(self, context: WorkContext, task: "asyncio.Task[Any]") -> None:
        """Cancel work whose result is no longer needed: at once if it waits for a thread, else at
        its next check.
        """
        context.cancelled.set()
        if not context.has_begun:
            task.cancel()

    def _end(self, context: WorkContext, task: "asyncio.Task[Any]") -> None:
        del self.accepted[context]
        if not task.cancelled():
            task.exception()  # read, so that asyncio does not report it as never retrieved
        burst_ended = self._most >= BURST and not self.accepted
        if burst_ended or time.monotonic() - self._released_at > RELEASE_S:
            self._most = 0
            self._released_at = time.monotonic()
            # it may take a while
            threading.Thread(target=release_memory, name="ragkv-release", daemon=True).start()


async def unless_disconnected(request: Request, outcome: "asyncio.Future[T]") -> T:
    """The result of `outcome`; raises `ApiError` 499 if the client disconnects first. The body must
    be read already.
    """

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


def _shutting_down() -> ApiError:
    return ApiError(
        503, "The server is shutting down. Ask again.", "shutting_down", retry_after_s=5
    )
