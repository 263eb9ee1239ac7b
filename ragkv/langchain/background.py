"""An iterator drained on a thread of its own, for a task that awaits what it gives as it comes.

Not on a shared pool: streams that wait for one another there would wait for ever. A reader who leaves sets the event
that the iterator was made with, and the thread ends.
"""

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable, Generator
from typing import TypeVar

T = TypeVar("T")


async def drained(make: Callable[[threading.Event], Generator[T]]) -> AsyncIterator[T]:
    """What `make(left)` gives; `left` is set once nobody reads any more."""
    loop, queue = asyncio.get_running_loop(), asyncio.Queue[tuple[T] | BaseException | None]()
    left = threading.Event()

    def put(item: tuple[T] | BaseException | None) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(queue.put_nowait, item)

    def drain() -> None:
        items = make(left)
        try:
            for item in items:
                if left.is_set():
                    break
                put((item,))
            put(None)
        except BaseException as error:  # it belongs to the reader
            put(error)
        finally:
            items.close()

    threading.Thread(target=drain, name="ragkv-stream", daemon=True).start()
    try:
        while (item := await queue.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            yield item[0]
    finally:
        left.set()
