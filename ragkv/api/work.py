"""Blocking work for an event loop that must not block: anyio's threads, a limiter for each tenant,
and streams.

A pool accepts a limited number of work items, in all and of one tenant, and refuses the next one
immediately. One tenant holds at most a share of the threads. The only queue that is fair by time is
at the model (`scheduling/`). The thread of a stream pauses when it is `AHEAD` items ahead of the
reader, so a slow reader delays only itself. When the client disconnects, its work is cancelled: it
stops at the next token, layer, batch or poll.
"""

import asyncio
import contextlib
import math
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Generator
from contextlib import asynccontextmanager
from typing import TypeVar

from anyio import CancelScope, CapacityLimiter, current_time, to_thread
from starlette.requests import Request

from ragkv.errors import CancelledError
from ragkv.runtime import Check, Claim, PausingCheck, openmp, release_memory
from ragkv.runtime.thread_stream import Channel

from .errors import ApiError
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
    """The request that a piece of work serves, its deadline, and whether it is cancelled. Made on the
    event loop's thread.
    """

    def __init__(self, request: Request, deadline_s: float | None) -> None:
        """`deadline_s` counts from now; `None`: no deadline."""
        self.request = request
        self.cancelled = threading.Event()  # set once the result is no longer needed
        self.claim = Claim(self.tenant, deadline_s, self.cancelled)
        self.check = self.claim.check  # long work calls it between batches
        # in which it waits for a thread
        self.waiting = CancelScope(deadline=current_time() + (deadline_s or math.inf))
        self.shutting_down = False  # whether it was the server that cancelled the work
        self._loop = asyncio.get_running_loop()

    @property
    def tenant(self) -> str:
        """The tenant of the request's key; "" without keys."""
        return str(self.request.state.principal.tenant)

    def abandon(self) -> None:
        """Cancel work whose result is no longer needed: at once if it waits for a thread, else at
        its next check. On any thread.
        """
        self.cancelled.set()
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self.waiting.cancel)

    async def abandon_on_disconnect(self) -> None:
        """Cancel the work when the client disconnects. The request's body must be read already."""
        with contextlib.suppress(ApiError):  # what nobody read of the body is too large
            while (await self.request.receive())["type"] != "http.disconnect":
                pass
        self.abandon()


def giving_way(context: WorkContext, wait_idle: WaitIdle, tasks: Callable[[], int]) -> Check:
    """What a task calls before each batch, on its own thread: it pauses while answers run, and
    raises as `context`.

    `wait_idle` waits while answers run (`IdleTime.wait_idle`), `tasks` tells how many tasks run.
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
    """Runs work on threads. Call `run` and `stream` on the event loop's thread."""

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
        self.accepted = set[WorkContext]()  # work that waits or runs
        self.computing = set[WorkContext]()  # work on a thread
        self._most = 0  # accepted work at once since memory was released
        self._released_at = time.monotonic()
        self._closed = False

    async def run(self, request: Request, work: Callable[[WorkContext], T]) -> T:
        """Return what `work` returns; cancel it when the client of `request` disconnects."""
        return await self._run(self._accept(request), work)

    async def stream(
        self, request: Request, work: Callable[[WorkContext], Generator[T, None, None]]
    ) -> AsyncGenerator[T, None]:
        """The items that `work` yields. Closing the stream ends the work.

        Returns when the first item is there, so that an error before it can still be answered with
        its own status.
        """
        channel = Channel[T](AHEAD)

        def drain(context: WorkContext) -> None:
            with contextlib.closing(work(context)) as items:
                for item in items:
                    channel.put(item, context.check)
                    if context.cancelled.is_set():
                        context.check()

        context = self._accept(request)
        task = asyncio.ensure_future(self._run(context, drain))
        task.add_done_callback(
            lambda task: channel.end(_shutting_down() if task.cancelled() else task.exception())
        )

        async def read() -> AsyncGenerator[T, None]:
            try:
                async for item in channel:
                    yield item
            finally:
                context.abandon()
                channel.stop_reading()

        items = read()
        first = await anext(items)

        async def all_items() -> AsyncGenerator[T, None]:
            async with contextlib.aclosing(items):
                yield first
                async for later in items:
                    yield later

        return all_items()

    def cut(self) -> None:
        """Accept no more work and cancel what is accepted: what waits ends now, what runs ends at
        its next check.
        """
        self._closed = True
        for context in self.accepted.copy():
            context.shutting_down = True
            context.abandon()

    def close(self, timeout_s: float) -> bool:
        """Cancel what is running and wait until it has ended, for `timeout_s` at most; whether it
        has.
        """
        self.cut()
        ends = time.monotonic() + timeout_s
        while self.computing and time.monotonic() < ends:
            time.sleep(0.01)
        return not self.computing

    def _accept(self, request: Request) -> WorkContext:
        """Accept work; `_run` must follow. Raises what `check_space` raises."""
        context = WorkContext(request, self._deadline_s)
        self.check_space(context.tenant)
        self.accepted.add(context)
        self._most = max(self._most, len(self.accepted))
        return context

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
        """What `work` returns. Ends when its thread has ended, so it holds its place until then."""
        watcher = asyncio.ensure_future(context.abandon_on_disconnect())
        try:
            with context.waiting:
                async with self._limiter.hold(context.tenant):
                    # anyio shields this from the scope
                    return await to_thread.run_sync(
                        self._on_thread, context, work, limiter=self._threads
                    )
            context.check()  # its deadline passed
            raise CancelledError("The request was cancelled while it waited.")
        except (CancelledError, asyncio.CancelledError):
            if context.shutting_down:
                raise _shutting_down() from None
            raise
        finally:
            watcher.cancel()
            context.cancelled.set()
            self._end(context)

    def _on_thread(self, context: WorkContext, work: Callable[[WorkContext], T]) -> T:
        self.computing.add(context)
        try:
            context.check()
            return work(context)
        finally:
            openmp.release_threads()
            self.computing.discard(context)

    def _end(self, context: WorkContext) -> None:
        self.accepted.discard(context)
        burst_ended = self._most >= BURST and not self.accepted
        if burst_ended or time.monotonic() - self._released_at > RELEASE_S:
            self._most = 0
            self._released_at = time.monotonic()
            # it may take a while
            threading.Thread(target=release_memory, name="ragkv-release", daemon=True).start()


def _shutting_down() -> ApiError:
    return ApiError(
        503, "The server is shutting down. Ask again.", "shutting_down", retry_after_s=5
    )
