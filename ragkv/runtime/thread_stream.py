"""An iterator that runs in its own thread, for a task that awaits its items as they come.

Each stream has a thread of its own. In a shared pool, streams that wait for each other could wait forever.
"""

import asyncio
import contextlib
import threading
from collections.abc import AsyncGenerator, Callable, Generator
from typing import TypeVar

T = TypeVar("T")


async def iterate_in_thread(
    make: Callable[[threading.Event], Generator[T]], cancel: threading.Event | None = None
) -> AsyncGenerator[T, None]:
    """The items of `make(cancel)`. The event `cancel` is set when the reader stops, and then the thread ends."""
    loop, queue = asyncio.get_running_loop(), asyncio.Queue[tuple[T] | BaseException | None]()
    cancel = cancel or threading.Event()

    def put(item: tuple[T] | BaseException | None) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed, so there is no reader any more
            loop.call_soon_threadsafe(queue.put_nowait, item)

    def run() -> None:
        items = make(cancel)
        try:
            for item in items:
                if cancel.is_set():
                    break
                put((item,))
            put(None)
        except BaseException as error:  # raised again in the reader
            put(error)
        finally:
            items.close()

    threading.Thread(target=run, name="ragkv-stream", daemon=True).start()
    try:
        while (item := await queue.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            yield item[0]
    finally:
        cancel.set()


async def run_in_thread(work: Callable[[threading.Event], T], cancel: threading.Event | None = None) -> T:
    """The result of `work(cancel)` in a thread of its own. The event `cancel` is set if the task is cancelled."""

    def only(cancel: threading.Event) -> Generator[T]:
        yield work(cancel)

    async with contextlib.aclosing(iterate_in_thread(only, cancel)) as results:
        return await anext(results)
