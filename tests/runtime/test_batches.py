"""The lock for batches: threads get it in the order in which they came, urgent ones first; a check ends the wait."""

import threading
import time
from contextlib import nullcontext

import pytest

from ragkv.errors import CancelledError
from ragkv.runtime import BatchLock, acquired, never_urgent, working_for


def _wait_until_queued(lock: BatchLock, count: int) -> None:
    ends = time.monotonic() + 10
    while len(lock._urgent) + len(lock._others) < count:
        assert time.monotonic() < ends
        time.sleep(0.001)


def test_waiting_threads_get_the_lock_in_order_and_urgent_ones_first() -> None:
    lock, order, threads = BatchLock(), list[str](), []

    def work(name: str, urgent: bool) -> None:
        with never_urgent() if name == "task" else nullcontext(), lock.hold(urgent):
            order.append(name)

    with lock.hold():
        for number, (name, urgent) in enumerate(
            [("a", False), ("b", False), ("task", True), ("x", True), ("c", False), ("y", True)]
        ):
            threads.append(threading.Thread(target=work, args=[name, urgent]))
            threads[-1].start()
            _wait_until_queued(lock, number + 1)
    for thread in threads:
        thread.join(60)
    assert order == ["x", "y", "a", "b", "task", "c"]


def test_a_check_that_raises_ends_the_wait_and_the_lock_goes_to_the_next_thread() -> None:
    lock = BatchLock()

    def check() -> None:
        raise CancelledError("enough")

    with lock.hold():
        with pytest.raises(CancelledError), lock.hold(check=check):
            pass
        plain = threading.Lock()
        with plain, pytest.raises(CancelledError), acquired(plain, check):
            pass
    with lock.hold(), acquired(plain, check):
        pass


def test_a_tenants_one_batch_comes_before_another_tenants_second_one() -> None:
    lock, order, threads = BatchLock(), list[str](), []

    def work(owner: str) -> None:
        with working_for(owner), lock.hold():
            order.append(owner)

    with working_for("a"), lock.hold():
        for number, owner in enumerate("aab"):
            threads.append(threading.Thread(target=work, args=[owner]))
            threads[-1].start()
            _wait_until_queued(lock, number + 1)
        time.sleep(0.01)
    for thread in threads:
        thread.join(60)
    assert "".join(order) == "baa"
