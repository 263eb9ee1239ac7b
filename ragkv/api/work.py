"""Blocking work for an event loop that must not block: anyio's threads, a limiter for each tenant,
and streams.

A pool accepts a limited number of requests, in all and of one tenant, and refuses the next one
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
from collections.abc import AsyncIterator, Callable, Generator
from contextlib import asynccontextmanager
from typing import Generic, Self, TypeVar

from anyio import CancelScope, CapacityLimiter, current_time, to_thread
from starlette.requests import Request

from ragkv.errors import CancelledError
from ragkv.runtime import Check, Claim, PausingCheck, begun, openmp, release_memory
from ragkv.runtime.thread_stream import Channel

from .errors import ApiError
from .settings import QueueConfig

T = TypeVar("T")
WaitIdle = Callable[[float, Callable[[], bool]], None]

AHEAD = 64  # items that a stream's thread may be ahead of the reader
BURST = 8  # requests at once: once none of them is left, freed memory is given back
RELEASE_S = 60.0  # a server that is never idle gives freed memory back after this time
BATCH_S = 0.01  # Less computing than this is not worth a pause.
FREE_S = 0.2  # Work that computes less than this in all, such as a search, makes no pause.
# A pause is at most this many times what the last batch computed, for each request that works.
PAUSE_SHARE = 4.0
PAUSE_S = 0.5  # No pause is longer, so that a cancelled request ends soon.


class AcceptedRequest:
    """A request that a pool has accepted, until its work has ended. Made on the event loop's
    thread.
    """

    def __init__(self, request: Request, deadline_s: float | None) -> None:
        """`deadline_s` counts from now; `None`: no deadline."""
        self._request = request
        self.tenant = str(request.state.principal.tenant)  # of its key; "" without keys
        self.cancelled = threading.Event()  # set once the result is no longer needed
        self.claim = Claim(self.tenant, deadline_s, self.cancelled)
        # in which it waits for a thread
        ends = math.inf if deadline_s is None else current_time() + deadline_s
        self.waiting = CancelScope(deadline=ends)
        self.shutting_down = False  # whether it was the server that cancelled the work
        self._loop = asyncio.get_running_loop()

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
            while (await self._request.receive())["type"] != "http.disconnect":
                pass
        self.abandon()


def pausing_check(claim: Claim, wait_idle: WaitIdle, at_work: Callable[[], int]) -> Check:
    """What work on data calls before each batch, on its own thread: it pauses while answers run,
    and raises as `claim`.

    `wait_idle` waits while answers run (`IdleTime.wait_idle`), `at_work` tells how many requests do
    work on data. While answers run, all of them together compute for about 1 / (1 + PAUSE_SHARE) of
    the time, a fifth of a core. So each still comes to an end.
    """
    began = resumed = time.thread_time()

    def check() -> None:
        nonlocal resumed
        claim.check()
        computed_s = time.thread_time() - resumed
        if computed_s < BATCH_S or time.thread_time() - began < FREE_S:
            return
        openmp.release_threads()
        wait_idle(min(PAUSE_S, PAUSE_SHARE * computed_s * at_work()), lambda: claim.is_over)
        resumed = time.thread_time()
        claim.check()

    return PausingCheck(check, claim.check)


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


class WorkItems(Generic[T]):
    """What a request's work yields, as it comes. Closing it ends the work, read or not: a generator
    that nobody has asked for an item would do nothing.
    """

    def __init__(self, channel: Channel[T], accepted: AcceptedRequest) -> None:
        self._channel = channel
        self._accepted = accepted
        self._items = aiter(channel)
        self._first: list[T] = []  # the first item, until it is read

    async def begin(self) -> None:
        """Return when the first item is there; raises the error that comes instead."""
        self._first.append(await anext(self._items))

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> T:
        return self._first.pop() if self._first else await anext(self._items)

    def close(self) -> None:
        """End the work."""
        self._accepted.abandon()
        self._channel.stop_reading()


class RequestPool:
    """Does the work of requests on threads. Call `run` and `stream` on the event loop's thread."""

    def __init__(
        self, queue: QueueConfig, threads: int, tenant_threads: int, deadline_s: float | None
    ) -> None:
        """At most `threads` requests run at once, and `tenant_threads` of one tenant with a key.
        `queue` says how many are accepted, those that wait included.
        """
        self._queue = queue
        self._deadline_s = deadline_s
        self._limiter = TenantLimiter(threads, tenant_threads)
        self._threads = CapacityLimiter(math.inf)  # anyio's own bound would be a second one
        self.accepted = set[AcceptedRequest]()  # they wait or run
        self.computing = set[AcceptedRequest]()  # they have a thread
        self._most = 0  # accepted ones at once since memory was released
        self._released_at = time.monotonic()
        self._closed = False

    async def run(self, request: Request, work: Callable[[Claim], T]) -> T:
        """Return what `work` returns; cancel it when the client of `request` disconnects."""
        return await self._run(self._accept(request), work)

    async def stream(
        self, request: Request, work: Callable[[Claim], Generator[T, None, None]]
    ) -> WorkItems[T]:
        """The items that `work` yields. Closing them ends the work.

        Returns when the first item is there, so that an error before it can still be answered with
        its own status.
        """
        channel = Channel[T](AHEAD)
        accepted = self._accept(request)
        items = WorkItems(channel, accepted)

        def drain(claim: Claim) -> None:
            with contextlib.closing(work(claim)) as items:
                for item in items:
                    channel.put(item, claim.check)
                    if accepted.cancelled.is_set():
                        claim.check()

        running = asyncio.ensure_future(self._run(accepted, drain))
        running.add_done_callback(
            lambda ran: channel.end(_shutting_down() if ran.cancelled() else ran.exception())
        )

        try:
            await items.begin()
        except BaseException:
            items.close()
            raise
        return items

    def cancel_all(self) -> None:
        """Accept no more requests and cancel the accepted ones: what waits ends now, what runs ends
        at its next check.
        """
        self._closed = True
        for accepted in self.accepted.copy():
            accepted.shutting_down = True
            accepted.abandon()

    def close(self, timeout_s: float) -> bool:
        """Cancel what is running and wait until it has ended, for `timeout_s` at most; whether it
        has.
        """
        self.cancel_all()
        ends = time.monotonic() + timeout_s
        while self.computing and time.monotonic() < ends:
            time.sleep(0.01)
        return not self.computing

    def check_space(self, tenant: str) -> None:
        """Raise `ApiError` if too many requests of the tenant or of all tenants are accepted
        already.
        """
        mine = sum(accepted.tenant == tenant for accepted in self.accepted)
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

    def _accept(self, request: Request) -> AcceptedRequest:
        """Accept a request; `_run` must follow. Raises what `check_space` raises."""
        accepted = AcceptedRequest(request, self._deadline_s)
        self.check_space(accepted.tenant)
        self.accepted.add(accepted)
        self._most = max(self._most, len(self.accepted))
        return accepted

    async def _run(self, accepted: AcceptedRequest, work: Callable[[Claim], T]) -> T:
        """What `work` returns. Ends when its thread has ended, so it holds its place until then."""
        watcher = asyncio.ensure_future(accepted.abandon_on_disconnect())
        try:
            with accepted.waiting:
                async with self._limiter.hold(accepted.tenant):
                    # anyio shields this from the scope
                    return await to_thread.run_sync(
                        self._on_thread, accepted, work, limiter=self._threads
                    )
            accepted.claim.check()  # its deadline passed
            raise CancelledError("The request was cancelled while it waited.")
        except (CancelledError, asyncio.CancelledError):
            if accepted.shutting_down:
                raise _shutting_down() from None
            raise
        finally:
            watcher.cancel()
            accepted.cancelled.set()
            self._end(accepted)

    def _on_thread(self, accepted: AcceptedRequest, work: Callable[[Claim], T]) -> T:
        self.computing.add(accepted)
        try:
            accepted.claim.check()
            return work(accepted.claim)
        finally:
            openmp.release_threads()
            self.computing.discard(accepted)

    def _end(self, accepted: AcceptedRequest) -> None:
        self.accepted.discard(accepted)
        burst_ended = self._most >= BURST and not self.accepted
        if burst_ended or time.monotonic() - self._released_at > RELEASE_S:
            self._most = 0
            self._released_at = time.monotonic()
            # it may take a while
            begun(release_memory, "ragkv-release", "free memory is given back later")


def _shutting_down() -> ApiError:
    return ApiError(
        503, "The server is shutting down. Ask again.", "shutting_down", retry_after_s=5
    )
