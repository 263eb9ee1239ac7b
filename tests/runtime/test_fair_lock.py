"""One thread holds the lock at a time: whose tenant used least, urgent ones first; a waiting one
may be dismissed.
"""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from ragkv.errors import CancelledError
from ragkv.runtime import FairLock, TimeShareQueue, Wait, acquired, fair_lock
from tests.faults import raising
from tests.scheduling.helpers import begin, until


def enqueue(lock: FairLock, wait: Wait, got: list[tuple[Wait, bool]]) -> threading.Thread:
    """Start a thread that queues for the lock; `got` receives the result of `acquire`."""
    before = lock.waiting

    def run() -> None:
        granted = lock.acquire(wait)
        got.append((wait, granted))
        if granted:
            lock.release()

    thread = begin(run)
    until(lambda: lock.waiting > before)
    return thread


def test_only_one_thread_holds_the_lock_at_a_time() -> None:
    lock = FairLock()
    inside = [0]
    most = [0]

    def enter(_: int) -> None:
        for _ in range(200):
            with lock.hold():
                inside[0] += 1
                most[0] = max(most[0], inside[0])
                inside[0] -= 1

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(enter, range(8)))
    assert most == [1]
    assert not lock.held


def test_a_tenant_with_one_request_is_served_before_another_tenants_second_one() -> None:
    lock = FairLock()
    got = []
    lock.acquire(Wait("a"))
    waits = [Wait("a"), Wait("a"), Wait("b")]
    threads = [enqueue(lock, wait, got) for wait in waits]
    lock.release()
    for thread in threads:
        thread.join(60)
    assert [wait for wait, _ in got] == [waits[2], waits[0], waits[1]]


def test_a_holder_gives_way_to_another_tenant_and_then_continues_before_its_own_tenants_others() -> (
    None
):
    lock = FairLock()
    got = []
    lock.acquire(Wait("a"))
    other = Wait("b")
    own = Wait("a")
    threads = [enqueue(lock, wait, got) for wait in (own, other)]
    time.sleep(0.05)  # more than a tenant may use before another one is due
    lock.give_way()
    assert [wait for wait, _ in got] == [other]
    lock.give_way()  # "a" waits, which is not another tenant
    lock.release()
    for thread in threads:
        thread.join(60)
    assert [wait for wait, _ in got] == [other, own]
    assert not lock.held


def test_a_step_is_charged_to_the_tenants_of_its_rows_and_not_to_its_leader() -> None:
    lock = FairLock()
    got = []
    lock.acquire(Wait("a"))
    waits = [Wait("b"), Wait("a")]
    threads = [enqueue(lock, wait, got) for wait in waits]
    time.sleep(0.02)
    lock.share(["b", "b"], 10.0)  # which is more than "a" held the lock
    lock.release()
    for thread in threads:
        thread.join(60)
    assert [wait for wait, _ in got] == [waits[1], waits[0]]


def test_a_dismissed_wait_ends_its_wait_without_the_lock() -> None:
    lock = FairLock()
    got = []
    waits = [Wait() for _ in range(3)]
    lock.acquire()
    threads = [enqueue(lock, wait, got) for wait in waits]
    lock.dismiss(waits[::2])
    for thread in threads[::2]:
        thread.join(60)
    assert dict(got) == {waits[0]: False, waits[2]: False}
    lock.release()
    threads[1].join(60)
    assert got[2:] == [(waits[1], True)]
    assert not lock.held


def test_an_interrupted_wait_holds_neither_a_place_nor_the_lock() -> None:
    lock = FairLock()

    class Interrupted(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            if handed_over:
                lock.release()  # the holder grants the lock to this wait right now
            raise KeyboardInterrupt

    for handed_over in (False, True):
        wait = Wait()
        wait.over = Interrupted()
        lock.acquire()
        try:
            lock.acquire(wait)
        except KeyboardInterrupt:
            assert not lock.waiting
            assert lock.held is not handed_over
            if not handed_over:
                lock.release()
        else:
            raise AssertionError("not interrupted")


def test_urgent_waits_go_in_front_of_their_own_tenants_others_and_never_of_another_tenants() -> (
    None
):
    lock = FairLock()
    order = list[str]()
    threads = []

    def work(name: str, tenant: str) -> None:
        with lock.hold(tenant, urgent=name.isupper()):
            order.append(name)
            time.sleep(0.005)

    with lock.hold("questions"):
        for number, name in enumerate(["a", "B", "c", "D", "search"]):
            threads.append(begin(work, name, "other" if name == "search" else "questions"))
            until(lambda lock=lock, number=number: lock.waiting > number)
    for thread in threads:
        thread.join(60)
    assert order == ["search", "B", "D", "a", "c"]


def test_a_check_that_raises_ends_the_wait_and_the_lock_goes_to_the_next_thread() -> None:
    lock = FairLock()
    check = raising(CancelledError("enough"))
    with lock.hold():
        with pytest.raises(CancelledError), lock.hold(check=check):
            pass
        plain = threading.Lock()
        with plain, pytest.raises(CancelledError), acquired(plain, check):
            pass
    with lock.hold(), acquired(plain, check):
        pass


def test_a_tenant_that_was_away_is_not_owed_the_time() -> None:
    queue = TimeShareQueue[int]()
    for number in range(10):
        queue.add("a", number)
        queue.take()
        queue.charge("a", 1.0)
    queue.add("a", 0)
    queue.add("b", 0)
    assert queue.take()[0] == "b"
    queue.charge("b", 1.5)
    queue.add("b", 1)
    assert queue.take()[0] == "a"


def test_whoever_holds_the_lock_has_entered_it_and_whoever_waits_or_hands_it_on_has_left() -> None:
    calls: list[tuple[int, str]] = []
    lock = FairLock(
        lambda: calls.append((threading.get_ident(), "left")),
        lambda: calls.append((threading.get_ident(), "entered")),
    )
    here = threading.get_ident()
    lock.acquire(Wait("a"))
    assert calls == [(here, "entered")]
    time.sleep(2 * fair_lock.QUANTUM_S)
    thread = enqueue(lock, Wait("b"), [])
    lock.give_way()  # the other thread's whole turn is within
    thread.join(60)
    there = thread.ident
    assert calls[1] == (there, "left")
    assert [what for who, what in calls[2:] if who == there] == ["entered", "left"]
    assert [what for who, what in calls[1:] if who == here] == ["left", "entered"]
    lock.release()
    assert calls[-1] == (here, "left")
    lock.acquire(Wait("a"))
    lock.release(coming_back=True)
    assert calls[-1] == (here, "entered")


def test_a_dismissed_wait_does_not_enter() -> None:
    entered: list[int] = []
    lock = FairLock(entering=lambda: entered.append(1))
    lock.acquire()
    wait = Wait()
    thread = enqueue(lock, wait, [])
    lock.dismiss([wait])
    thread.join(60)
    assert entered == [1]


def test_a_free_lock_is_held_at_once_and_another_one_is_not_waited_for() -> None:
    lock = FairLock()
    assert lock.acquire(waits=False) and lock.is_mine
    assert not lock.acquire(waits=False) and lock.held
    lock.release()
    assert not lock.held
