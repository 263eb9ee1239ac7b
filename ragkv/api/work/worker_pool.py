"""Blocking work for an event loop that must not block: threads shared fairly by tenants, and streams from a thread to
the loop.

A pool accepts a bounded number of work items, in all and of one tenant, and refuses the next one immediately. Its
threads take work from the tenants in turns, and one tenant holds at most a share of them, so that the work of others
starts soon whatever one tenant sends. The thread of a stream pauses when it is `AHEAD` items ahead of the reader, so a
slow reader delays only itself. When the client disconnects, its work is cancelled: it stops at the next token, layer,
batch or poll.
"""

import asyncio
import contextlib
import threading
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Generator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from starlette.requests import Request

from ragkv.errors import CancelledError
from ragkv.runtime import openmp, release_memory, tracing, working_for

from ..errors import CLIENT_GONE, ApiError
from ..keys import Principal
from .fair_queue import FairQueue
from .work_context import Channel, WorkContext

T = TypeVar("T")
BURST = 8  # after so many jobs at once, their freed memory is given back when none is left ...
RELEASE_S = 60.0  # ... and on a server that is never idle, so often


@dataclass(frozen=True, slots=True)
class PoolLimits:
    """How much work a pool accepts and runs, of all tenants and of one tenant with a key."""

    threads: int  # pieces of work that run at once
    accepted: int  # pieces of work that run or wait
    tenant_threads: int  # of `threads`
    tenant_accepted: int  # of `accepted`


class _Job(Generic[T]):
    """One piece of accepted work."""

    def __init__(self, context: WorkContext, tenant: str, work: Callable[[WorkContext], T]) -> None:
        self.context, self.tenant = context, tenant
        self.future: Future[T] = Future()
        self._work, self._trace = work, tracing.current()

    def run(self) -> None:
        """Run the work, unless it was dropped."""
        if not self.future.set_running_or_notify_cancel():
            return
        try:
            self.context.check()
            with tracing.attached(self._trace):
                result = self._work(self.context)
        except BaseException as error:
            self.future.set_exception(_shown(error, self.context))
        else:
            self.future.set_result(result)


class WorkerPool:
    """Runs work on threads. Call `run`, `run_stream` and `stream` on the event loop's thread."""

    def __init__(self, name: str, limits: PoolLimits, deadline_s: float | None) -> None:
        self._name, self._limits, self._deadline_s = name, limits, deadline_s
        self._changed = threading.Condition()
        self._waiting: FairQueue[_Job[Any]] = FairQueue()
        self._accepted: set[_Job[Any]] = set()  # waiting and running jobs
        self._running: Counter[str] = Counter()  # running jobs by tenant
        self._threads: list[threading.Thread] = []
        self._idle = 0
        self._most = 0  # running jobs at once since memory was released
        self._released_at = time.monotonic()
        self._closed = False

    @property
    def running(self) -> int:
        """Pieces of work that are accepted and not finished."""
        with self._changed:
            return len(self._accepted)

    async def run(self, request: Request, work: Callable[[WorkContext], T]) -> T:
        """Return what `work` returns; cancel it when the client of `request` disconnects."""
        job = self._submit(request, work)
        outcome = asyncio.wrap_future(job.future)
        try:
            return await unless_disconnected(request, outcome)
        finally:
            self._abandon(job)
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

    def cut(self) -> None:
        """Accept no more work and cancel what is accepted: what waits ends now, what runs ends at its next check."""
        with self._changed:
            self._closed = True
            dropped = self._waiting.clear()
            for job in self._accepted:
                job.context.cut()
            self._accepted.difference_update(dropped)
            self._changed.notify_all()
        for job in dropped:
            if job.future.set_running_or_notify_cancel():
                job.future.set_exception(_shutting_down())

    def close(self, timeout_s: float | None = None) -> bool:
        """Cancel what is running and wait until it has ended, for `timeout_s` at most; whether it has."""
        self.cut()
        ends = None if timeout_s is None else time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(None if ends is None else max(0.0, ends - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    async def _items(
        self, request: Request, work: Callable[[WorkContext], Generator[T, None, None]]
    ) -> AsyncGenerator[T, None]:
        channel: Channel[T] = Channel(asyncio.get_running_loop())

        def drain(context: WorkContext) -> None:
            with contextlib.closing(work(context)) as items:
                for item in items:
                    if not channel.put(item, context):
                        context.check()
                        break

        job = self._submit(request, drain)
        job.future.add_done_callback(channel.end)
        try:
            async for item in channel:
                yield item
        finally:
            self._abandon(job)
            channel.stop_reading()

    def _submit(self, request: Request, work: Callable[[WorkContext], T]) -> "_Job[T]":
        """Accept `work`; raises `ApiError` if too much of the tenant's or of all tenants' work is accepted already."""
        principal: Principal = request.state.principal
        job = _Job(WorkContext(request, self._deadline_s), principal.tenant, work)
        with self._changed:
            self._check_space(principal.tenant)
            self._accepted.add(job)
            self._waiting.add(job.tenant, job)
            if len(self._waiting) > self._idle and len(self._threads) < self._limits.threads:
                name = f"ragkv-{self._name}-{len(self._threads)}"
                # A daemon: work that does not end must not keep the process from ending.
                thread = threading.Thread(target=self._work, name=name, daemon=True)
                self._threads.append(thread)
                thread.start()
            self._changed.notify()
        return job

    def _check_space(self, tenant: str) -> None:
        limits, mine = self._limits, sum(job.tenant == tenant for job in self._accepted)
        if self._closed:
            raise _shutting_down()
        if tenant and mine >= limits.tenant_accepted:
            message = (
                f"{mine} requests of this key's tenant are running or waiting already, and the setting "
                "queue.tenant_limit allows no more. Ask again when one of them has ended."
            )
            raise ApiError(429, message, "tenant_queue_full", retry_after_s=1)
        if len(self._accepted) >= limits.accepted:
            message = (
                f"{len(self._accepted)} requests are running or waiting already, and the setting queue.limit allows no "
                "more. Ask again."
            )
            raise ApiError(503, message, "queue_full", retry_after_s=1)

    def _abandon(self, job: _Job[Any]) -> None:
        """Cancel a job whose result is no longer needed: at once if it waits for a thread, else at its next check."""
        job.context.cancelled.set()
        with self._changed:
            waited = self._waiting.remove(job.tenant, job)
            if waited:
                self._accepted.discard(job)
        if waited:
            job.future.cancel()

    def _work(self) -> None:
        while (job := self._next()) is not None:
            with working_for(job.tenant):
                job.run()
            openmp.release_threads()
            # Abandoned work counts too, until it has ended.
            with self._changed:
                self._most = max(self._most, self._running.total())
                self._accepted.discard(job)
                self._running -= Counter([job.tenant])
                self._changed.notify_all()
                release = self._is_release_due()
            del job  # or the thread would hold the result until its next job
            if release:
                release_memory()

    def _is_release_due(self) -> bool:
        """Whether the thread that calls this releases memory now. Needs `_changed`."""
        burst_ended = self._most >= BURST and not self._accepted
        if not burst_ended and time.monotonic() - self._released_at < RELEASE_S:
            return False
        self._most, self._released_at = 0, time.monotonic()
        return True

    def _next(self) -> _Job[Any] | None:
        """Wait for the next job, of the tenants in turns; `None` once the pool is closed."""
        with self._changed:
            while not self._closed:
                if (taken := self._waiting.take(self._may_run)) is not None:
                    tenant, job = taken
                    self._running[tenant] += 1
                    return job
                self._idle += 1
                self._changed.wait()
                self._idle -= 1
            return None

    def _may_run(self, tenant: str) -> bool:
        """Whether the tenant may hold one more thread. Without keys everyone is one tenant, which may hold all."""
        return not tenant or self._running[tenant] < self._limits.tenant_threads


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


def consume_exception(outcome: "asyncio.Future[Any]") -> None:
    """Read the exception of an abandoned future, so that asyncio does not report it as never retrieved."""
    if not outcome.cancelled():
        outcome.exception()


def _shown(error: BaseException, context: WorkContext) -> BaseException:
    """`error`, or that the server shuts down if that is why the work was cancelled."""
    return _shutting_down() if context.shutting_down and isinstance(error, CancelledError) else error


def _shutting_down() -> ApiError:
    return ApiError(503, "The server is shutting down. Ask again.", "shutting_down", retry_after_s=5)
