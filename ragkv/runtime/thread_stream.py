"""Items from a thread, for a task that awaits them as they come.

Each stream has a thread of its own. In a shared pool, streams that wait for each other could wait
forever.
"""

import asyncio
import contextlib
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Generator
from typing import Generic, TypeVar

from .waiting import POLL_S, Check, no_check

T = TypeVar("T")


class Channel(Generic[T]):
    """Items from a thread to a task of the event loop that runs now. The thread never waits for the
    loop.
    """

    def __init__(self, ahead: int | None = None) -> None:
        """The thread may be `ahead` items ahead of the reader; `None`: any number."""
        self._loop = asyncio.get_running_loop()
        self._items = asyncio.Queue[tuple[T] | BaseException | None]()
        self._free = None if ahead is None else threading.Semaphore(ahead)

    def put(self, item: T, check: Check = no_check) -> None:
        """Add an item once there is a place; meanwhile `check` is called, which may raise."""
        while self._free is not None and not self._free.acquire(timeout=POLL_S):
            check()
        self._send((item,))

    def end(self, error: BaseException | None = None) -> None:
        """End the stream, with an error if there is one, which is raised in the reader."""
        self._send(error)

    def stop_reading(self) -> None:
        """Wake a thread that waits for a place, so that it sees that nobody reads."""
        if self._free is not None:
            self._free.release()

    def _send(self, item: tuple[T] | BaseException | None) -> None:
        # the loop is closed, so there is no reader any more
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._items.put_nowait, item)

    async def __aiter__(self) -> AsyncIterator[T]:
        while (item := await self._items.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            if self._free is not None:
                self._free.release()
            yield item[0]


async def iterate_in_thread(
    make: Callable[[threading.Event], Generator[T]],
) -> AsyncGenerator[T, None]:
    """The items of `make(cancel)`. The event `cancel` is set when the reader stops, and then the
    thread ends.
    """
    channel = Channel[T]()
    cancel = threading.Event()

    def run() -> None:
        try:
            with contextlib.closing(make(cancel)) as items:
                for item in items:
                    if cancel.is_set():
                        break
                    channel.put(item)
            channel.end()
        except BaseException as error:
            channel.end(error)

    threading.Thread(target=run, name="ragkv-stream", daemon=True).start()
    try:
        async for item in channel:
            yield item
    finally:
        cancel.set()


async def run_in_thread(work: Callable[[threading.Event], T]) -> T:
    """The result of `work(cancel)` in a thread of its own. The event `cancel` is set if the task is
    cancelled.
    """

    def only(cancel: threading.Event) -> Generator[T]:
        yield work(cancel)

    async with contextlib.aclosing(iterate_in_thread(only)) as results:
        return await anext(results)
