"""One thread holds the compute lock at a time, first come first served; a waiter may be dismissed without it."""

import threading
import time

from ragkv.runtime import working_for
from ragkv.scheduling import ComputeLock, Waiter


def enqueue(compute: ComputeLock, waiter: Waiter, got: list[tuple[Waiter, bool]]) -> threading.Thread:
    """Start a thread that queues for the lock; `got` receives the result of `acquire`."""
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


def test_only_one_thread_holds_the_lock_at_a_time() -> None:
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
    assert compute._holder is None


def test_the_lock_is_granted_in_the_order_of_arrival() -> None:
    compute, got = ComputeLock(), []
    waiters = [Waiter() for _ in range(5)]
    compute.acquire()
    threads = [enqueue(compute, waiter, got) for waiter in waiters]
    compute.release()
    for thread in threads:
        thread.join(20)
    assert got == [(waiter, True) for waiter in waiters]


def test_a_thread_that_comes_back_queues_behind_the_waiting_ones() -> None:
    compute, got = ComputeLock(), []
    compute.acquire()
    thread = enqueue(compute, first := Waiter(), got)
    compute.release()
    compute.acquire()
    thread.join(20)
    assert got == [(first, True)]
    compute.release()


def waiter_for(owner: str) -> Waiter:
    with working_for(owner):
        return Waiter()


def test_a_tenant_with_one_request_is_served_before_another_tenants_second_one() -> None:
    compute, got = ComputeLock(), []
    compute.acquire(waiter_for("a"))
    waiters = [waiter_for("a"), waiter_for("a"), waiter_for("b")]
    threads = [enqueue(compute, waiter, got) for waiter in waiters]
    compute.release()
    for thread in threads:
        thread.join(20)
    assert [waiter for waiter, _ in got] == [waiters[2], waiters[0], waiters[1]]


def test_a_holder_gives_way_to_another_tenant_and_then_continues_before_its_own_tenants_others() -> None:
    compute, got = ComputeLock(), []
    compute.acquire(holder := waiter_for("a"))
    other, own = waiter_for("b"), waiter_for("a")
    threads = [enqueue(compute, waiter, got) for waiter in (own, other)]
    time.sleep(0.05)  # more than an owner may use before another one is due
    compute.give_way()
    assert [waiter for waiter, _ in got] == [other] and compute._holder is holder
    compute.give_way()  # "a" waits, which is not another tenant
    compute.release()
    for thread in threads:
        thread.join(20)
    assert [waiter for waiter, _ in got] == [other, own]
    assert compute._holder is None


def test_a_step_is_charged_to_the_tenants_of_its_rows_and_not_to_its_leader() -> None:
    compute, got = ComputeLock(), []
    compute.acquire(waiter_for("a"))
    waiters = [waiter_for("b"), waiter_for("a")]
    threads = [enqueue(compute, waiter, got) for waiter in waiters]
    time.sleep(0.02)
    compute.share(["b", "b"], 10.0)  # which is more than "a" held the lock
    compute.release()
    for thread in threads:
        thread.join(20)
    assert [waiter for waiter, _ in got] == [waiters[1], waiters[0]]


def test_a_dismissed_waiter_ends_its_wait_without_the_lock() -> None:
    compute, got = ComputeLock(), []
    waiters = [Waiter() for _ in range(3)]
    compute.acquire()
    threads = [enqueue(compute, waiter, got) for waiter in waiters]
    compute.dismiss(waiters[::2])
    for thread in threads[::2]:
        thread.join(20)
    assert dict(got) == {waiters[0]: False, waiters[2]: False}
    compute.release()
    threads[1].join(20)
    assert got[2:] == [(waiters[1], True)]
    assert compute._holder is None


def test_a_waiter_dismissed_before_it_queues_does_not_wait() -> None:
    compute, waiter = ComputeLock(), Waiter()
    compute.dismiss([waiter])
    assert not compute.acquire(waiter)
    assert compute.acquire()


def test_an_interrupted_waiter_holds_neither_a_place_nor_the_lock() -> None:
    compute = ComputeLock()

    class Interrupted(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            if handed_over:
                compute.release()  # the holder grants the lock to this waiter right now
            raise KeyboardInterrupt

    for handed_over in (False, True):
        waiter = Waiter()
        waiter.called = Interrupted()
        compute.acquire()
        try:
            compute.acquire(waiter)
        except KeyboardInterrupt:
            assert not compute._queue
            assert (compute._holder is None) is handed_over
            if not handed_over:
                compute.release()
        else:
            raise AssertionError("not interrupted")
