"""The model goes to one at a time, first come first served; a waiter may be let go without it."""

import threading
import time

from ragkv.scheduling import ComputeLock, Waiter


def line_up(compute: ComputeLock, waiter: Waiter, got: list[tuple[Waiter, bool]]) -> threading.Thread:
    """A thread in the line; what `acquire` said goes into `got`."""
    before = len(compute._queue)

    def wait() -> None:
        granted = compute.acquire(waiter)
        got.append((waiter, granted))
        if granted:
            compute.release()

    thread = threading.Thread(target=wait)
    thread.start()
    ends = time.monotonic() + 20
    while len(compute._queue) == before and time.monotonic() < ends:
        time.sleep(0.0005)
    return thread


def test_it_is_had_by_one_at_a_time() -> None:
    compute, inside, most = ComputeLock(), [0], [0]

    def enter() -> None:
        for _ in range(200):
            with compute:
                inside[0] += 1
                most[0] = max(most[0], inside[0])
                inside[0] -= 1

    threads = [threading.Thread(target=enter) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert most == [1]
    assert not compute._held


def test_first_come_first_served() -> None:
    compute, got = ComputeLock(), []
    waiters = [Waiter() for _ in range(5)]
    compute.acquire()
    threads = [line_up(compute, waiter, got) for waiter in waiters]
    compute.release()
    for thread in threads:
        thread.join(20)
    assert got == [(waiter, True) for waiter in waiters]


def test_who_comes_back_stands_behind_who_waits() -> None:
    compute, got = ComputeLock(), []
    compute.acquire()
    thread = line_up(compute, first := Waiter(), got)
    compute.release()
    compute.acquire()
    thread.join(20)
    assert got == [(first, True)]
    compute.release()


def test_who_is_excused_goes_without() -> None:
    compute, got = ComputeLock(), []
    waiters = [Waiter() for _ in range(3)]
    compute.acquire()
    threads = [line_up(compute, waiter, got) for waiter in waiters]
    compute.dismiss(waiters[::2])
    for thread in threads[::2]:
        thread.join(20)
    assert dict(got) == {waiters[0]: False, waiters[2]: False}
    compute.release()
    threads[1].join(20)
    assert got[2:] == [(waiters[1], True)]
    assert not compute._held


def test_who_was_excused_before_lining_up_goes_without() -> None:
    compute, waiter = ComputeLock(), Waiter()
    compute.dismiss([waiter])
    assert not compute.acquire(waiter)
    assert compute.acquire()


def test_who_is_interrupted_keeps_nothing() -> None:
    compute = ComputeLock()

    class Interrupted(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            if handed_over:
                compute.release()  # by the one who has it: to this waiter, just now
            raise KeyboardInterrupt

    for handed_over in (False, True):
        waiter = Waiter()
        waiter.called = Interrupted()
        compute.acquire()
        try:
            compute.acquire(waiter)
        except KeyboardInterrupt:
            assert not compute._queue
            assert compute._held is not handed_over
            if not handed_over:
                compute.release()
        else:
            raise AssertionError("not interrupted")
