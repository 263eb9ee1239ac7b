"""Open values: each is opened at its first use, and closed when too many are open and nothing uses
it.

Closing may take long, because a value writes what it holds. So idle and leaving values are closed
on threads of their own. A thread that needs the place waits as long as its check allows. A thread
that gives a value back does not wait. Only if the system has no thread to give, it closes the value
itself.
"""

import logging
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Generic, TypeVar

from ragkv.errors import RagKVError

from .lifetime import Closing, close_elsewhere
from .waiting import POLL_S, Check, acquired, no_check, stop_of

log = logging.getLogger(__name__)

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class _Slot(Generic[V]):
    """The place of one key in the pool's table."""

    def __init__(self) -> None:
        self.users = 0  # guarded by the table's lock
        self.is_leaving = False  # to be closed when its last use ends; guarded by the table's lock
        self.lock = threading.Lock()  # held while the value is opened or closed
        self.value: V | None = None


class OpenPool(Closing, Generic[K, V]):
    """Open values by key. Values of other keys can be used while one is opened or closed.

    A value in use is never closed, except when the whole pool is. If too many values are open, the
    pool looks at the group with the most values, and closes its value that was idle longest. So a
    group that opens many closes its own. If all values keep too many bytes, the pool closes the
    value that was idle longest, of any group.
    """

    def __init__(
        self,
        limit: int,
        close: Callable[[V], None],
        *,
        group: Callable[[K], Hashable] = lambda key: key,
        most_bytes: int = 0,
        bytes_of: Callable[[V], int] = lambda _: 0,
    ) -> None:
        """`limit` values stay open, and more while all of them are in use. What `close` raises is
        logged.

        `bytes_of` a value is what it keeps in memory. All values together keep `most_bytes` at
        most, but a single value may keep more.
        """
        self._limit = limit
        self._close_value = close
        self._group = group
        self._most_bytes = most_bytes
        self._bytes_of = bytes_of
        # guards the table; never held while a value is opened or closed
        self._changed = threading.Condition()
        self._slots: OrderedDict[K, _Slot[V]] = OrderedDict()  # least recently used first
        # keys whose value a thread is closing; they are not in `_slots`
        self._closing: set[K] = set()
        self._closed = False

    @contextmanager
    def use(self, key: K, open_value: Callable[[], V], check: Check = no_check) -> Iterator[V]:
        """The value of `key`, open until the block ends; `open_value` opens it.

        Blocks while the value is opened or closed, and while another one is closed to make a place
        for it. Raises what `open_value` raises, and what `check` raises meanwhile.
        """
        slot = self._acquire(key, check)
        try:
            self._close_idle()
            with acquired(slot.lock, check):
                if slot.value is None:
                    self._wait_for_place(check)
                    self._check_open()
                    slot.value = open_value()
                value = slot.value
            yield value
        finally:
            self._release(key, slot)

    def opened(self) -> dict[K, V]:
        """The open values, for reading only: any of them may be closed at any time."""
        with self._changed:
            return {key: slot.value for key, slot in self._slots.items() if slot.value is not None}

    def close_one(self, key: K, wait: bool = True) -> None:
        """Close the value of `key` when its last use ends; with `wait`, return after that. New
        uses wait.
        """
        with self._changed:
            slot = self._slots.get(key)
            if slot is not None:
                slot.is_leaving = True
                slot = None if slot.users else self._claim(key)
        if slot is not None:
            self._finish(key, slot)
        elif wait:
            with self._changed:
                self._wait(lambda: not self._is_going(key), no_check)

    def close(self) -> None:
        """Close every value, in use or not, and refuse new uses."""
        with self._changed:
            self._closed = True
            slots = list(self._slots.values())
            self._slots = OrderedDict()
            self._changed.notify_all()
        for slot in slots:
            self._close_slot(slot)
        with self._changed:  # other threads may still close some
            self._wait(lambda: not self._closing, no_check)

    def _acquire(self, key: K, check: Check) -> _Slot[V]:
        with self._changed:
            self._wait(lambda: self._closed or not self._is_going(key), check)
            self._check_open()
            slot = self._slots.setdefault(key, _Slot())
            slot.users += 1
            self._slots.move_to_end(key)
            return slot

    def _wait_for_place(self, check: Check) -> None:
        """Return when enough idle values have been closed for one more."""
        with self._changed:
            self._wait(
                lambda: (
                    not self._closing
                    or len(self._slots) + len(self._closing) <= self._limit
                    or self._closed
                ),
                check,
            )

    def _wait(self, is_so: Callable[[], bool], check: Check) -> None:
        """Wait until the table changes so. The caller holds the table's lock, under which `check`
        must not wait.
        """
        stop = stop_of(check)
        while not self._changed.wait_for(is_so, None if check is no_check else POLL_S):
            stop()

    def _check_open(self) -> None:
        if self._closed:
            raise RagKVError("The server is closed.")

    def _is_going(self, key: K) -> bool:
        """Whether a value of `key` is being closed, or will be when its last use ends."""
        slot = self._slots.get(key)
        return key in self._closing or (slot is not None and slot.is_leaving)

    def _release(self, key: K, slot: _Slot[V]) -> None:
        with self._changed:
            slot.users -= 1
            never_opened = slot.value is None
            ended = not self._closed and not slot.users and (slot.is_leaving or never_opened)
            if ended:
                self._claim(key)
            self._changed.notify_all()
        if ended and never_opened:
            self._finish(key, slot)
        elif ended:
            close_elsewhere(partial(self._finish, key, slot))
        self._close_idle()

    def _close_idle(self) -> None:
        """Have idle values closed, as long as more than `limit` are open or they keep more than
        `most_bytes`.
        """
        while True:
            with self._changed:
                kept = {
                    key: 0 if (value := slot.value) is None else self._bytes_of(value)
                    for key, slot in self._slots.items()
                }
                many = len(kept) > self._limit
                large = sum(kept.values()) > self._most_bytes
                if not many:  # only what keeps bytes is closed for bytes
                    kept = {key: size for key, size in kept.items() if size}
                idle = [key for key in kept if not self._slots[key].users]
                if not idle or not (many or (large and len(kept) > 1)):
                    return
                sizes = Counter(self._group(key) for key in kept if many)
                # of equals, `max` takes the first
                key = max(idle, key=lambda key: sizes[self._group(key)])
                slot = self._claim(key)
            close_elsewhere(partial(self._finish, key, slot))

    def _claim(self, key: K) -> _Slot[V]:
        """Take an idle slot out of the table; `_finish` must follow. The caller holds the table's
        lock.
        """
        self._closing.add(key)
        return self._slots.pop(key)

    def _finish(self, key: K, slot: _Slot[V]) -> None:
        try:
            self._close_slot(slot)
        finally:
            with self._changed:
                self._closing.discard(key)
                self._changed.notify_all()

    def _close_slot(self, slot: _Slot[V]) -> None:
        with slot.lock:
            value = slot.value
            slot.value = None
            try:
                if value is not None:
                    self._close_value(value)
            except Exception:  # it must not keep the others open
                log.exception("close_failed")
