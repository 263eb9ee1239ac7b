"""Background work that gives way to requests: one thread, which begins an item while no request runs on the model."""

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

from ragkv.runtime import openmp

from .scheduler import Scheduler
from .ticket import IdleTicket

log = logging.getLogger(__name__)

LOOK_S = 60.0  # `LOOK_S` is the longest wait for idle time before it is looked for again.

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")


class IdleWorker(Generic[K, T]):
    """Works on items in the order in which they came; each waits once, however often it is added. Thread-safe."""

    def __init__(
        self, scheduler: Scheduler, name: str, work: Callable[[T], bool], patience_s: float | None = None
    ) -> None:
        """`work` returns whether it is done with the item; otherwise the item waits again. `name` is the thread's.

        An item that waited for `patience_s` is begun although requests run; with `None` none is.
        """
        self._scheduler, self._name, self._work, self._patience_s = scheduler, name, work, patience_s
        self._waiting: OrderedDict[K, T] = OrderedDict()
        self._current: K | None = None  # what is worked on, unless it was forgotten since
        self._working = False
        self._closing = False
        self._flushing = 0  # calls of `flush` under way; meanwhile work does not wait for idle time
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    @property
    def hurried(self) -> bool:
        """Whether work must not wait for idle time now."""
        return self._closing or self._flushing > 0

    @property
    def busy(self) -> bool:
        """Whether work that gives way to requests should stop now."""
        return self._closing or (self._scheduler.busy and not self._flushing)

    def ticket(self) -> IdleTicket:
        """A ticket of work that gives way to requests."""
        return IdleTicket(lambda: self.busy)

    def add(self, key: K, item: T) -> None:
        """Work on `item` when there is time. After `close` nothing is added."""
        with self._changed:
            if self._closing or key in self._waiting:
                return
            self._waiting[key] = item  # also if it is under way: what it is for may have changed since that began
            self._start()
            self._changed.notify_all()

    def forget(self, is_unwanted: Callable[[K], bool]) -> None:
        """Drop the items whose keys are not wanted any more; `wanted` is false for the one under way."""
        with self._changed:
            for key in [key for key in self._waiting if is_unwanted(key)]:
                del self._waiting[key]
            if self._current is not None and is_unwanted(self._current):
                self._current = None
            self._changed.notify_all()

    @contextmanager
    def wanted(self, key: K) -> Iterator[bool]:
        """Whether the item under way is still wanted; it is not forgotten inside the block."""
        with self._changed:
            yield self._current == key

    def flush(self) -> None:
        """Return when no item waits. Does not wait for requests to end."""
        openmp.release_threads()
        with self._changed:
            self._flushing += 1
            self._scheduler.wake()
            self._changed.wait_for(lambda: self._closing or not (self._waiting or self._working))
            self._flushing -= 1

    def close(self) -> bool:
        """Finish the item under way, unless it stops by itself, and drop the others. Twice is harmless.

        Garbage collection may call this on the worker's own thread. Then it returns `False`, and the thread ends soon.
        """
        with self._changed:
            self._closing = True
            self._waiting.clear()
            self._current = None
            self._changed.notify_all()
        self._scheduler.wake()
        if threading.current_thread() is self._thread:
            return False
        if self._thread is not None:
            self._thread.join()
        return True

    def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()

    def _run(self) -> None:
        while (found := self._next()) is not None:
            key, item = found
            done = True
            try:
                done = self._work(item)
            except Exception:
                log.exception("%s: one piece of work failed and is left out.", self._name)
            openmp.release_threads()
            with self._changed:
                if not done and not self._closing:
                    self._waiting.setdefault(key, item)
                self._working, self._current = False, None
                self._changed.notify_all()
            del found, item  # otherwise the item would live until the next one comes

    def _next(self) -> tuple[K, T] | None:
        """The next item once it may begin; `None` when this is closed."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closing)
            self._scheduler.wait_idle(self._patience_s or LOOK_S, lambda: self.hurried)
            with self._changed:
                if self._closing:
                    return None
                if self._waiting and (self._patience_s is not None or not self.busy):
                    self._working = True
                    self._current, item = self._waiting.popitem(last=False)
                    return self._current, item


__all__ = ["IdleWorker"]
