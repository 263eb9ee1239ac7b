"""What a piece of work on a thread knows of its request, and the channel through which it sends items to the loop."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from concurrent.futures import Future
from typing import Generic, TypeVar

from starlette.requests import Request

from ragkv.errors import CancelledError, DeadlineError

T = TypeVar("T")

AHEAD = 64  # items that a stream's thread may be ahead of the reader
POLL_S = 0.1  # how often a thread that waits for its reader looks whether it is cancelled


class WorkContext:
    """The request that a piece of work serves, its deadline, and whether it is cancelled."""

    def __init__(self, request: Request, deadline_s: float | None) -> None:
        """`deadline_s` counts from now; `None`: no deadline."""
        self.request = request
        self.cancelled = threading.Event()  # set once the result is no longer needed
        self.shutting_down = False  # whether it was the server that cancelled the work
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

    def check(self) -> None:
        """Raise `CancelledError` or `DeadlineError` if the work should end. Long work calls it between batches."""
        if self.cancelled.is_set():
            raise CancelledError("The request was cancelled.")
        self.remaining_s  # noqa: B018 - raises

    def cut(self) -> None:
        """Cancel the work because the server shuts down."""
        self.shutting_down = True
        self.cancelled.set()


class Channel(Generic[T]):
    """A queue of at most `AHEAD` unread items from a thread to the event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._free = threading.Semaphore(AHEAD)
        self._items: asyncio.Queue[tuple[T] | BaseException | None] = asyncio.Queue()

    def put(self, item: T, context: WorkContext) -> bool:
        """Wait for a free place, add `item`; `False` if the reader has stopped. Raises what `context.check` raises."""
        while not self._free.acquire(timeout=POLL_S):
            context.check()
        return not context.cancelled.is_set() and self._send((item,))

    def end(self, work: "Future[None]") -> None:
        """End the stream as `work` ended, with its error if there is one."""
        if not work.cancelled():
            self._send(work.exception())

    def stop_reading(self) -> None:
        """Wake a thread that waits for a free place, so that it sees `cancelled`."""
        self._free.release()

    def _send(self, item: tuple[T] | BaseException | None) -> bool:
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
