"""Shares of time: who used least is next, and an owner that was away is not owed the time."""

import sys
import threading
import time

from ragkv.runtime import TimeShareQueue, current_owner, working_for


def test_items_of_one_owner_are_taken_in_order() -> None:
    queue = TimeShareQueue[int]()
    for number in range(3):
        queue.add("a", number)
        queue.charge("a", 1.0)
    assert [queue.take()[1] for _ in range(3)] == [0, 1, 2]


def test_one_request_is_served_before_another_owners_second_one() -> None:
    queue = TimeShareQueue[str]()
    queue.begin("a")
    for number in range(32):
        queue.add("a", f"a{number}")
    queue.add("b", "b0")
    queue.charge("a", 0.1)
    assert queue.take() == ("b", "b0")
    queue.charge("b", 0.01)
    queue.add("b", "b1")
    assert queue.take()[0] == "b"  # it used less
    queue.charge("b", 1.0)
    queue.add("b", "b2")
    assert queue.take()[0] == "a"


def test_an_owner_that_was_away_is_not_owed_the_time() -> None:
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


def test_an_owner_is_due_when_it_used_less_than_the_one_that_is_served() -> None:
    queue = TimeShareQueue[int]()
    queue.begin("a")
    queue.add("a", 0)
    assert not queue.is_due("a", 10.0)  # no other owner waits
    queue.add("b", 0)
    assert not queue.is_due("a", 0.01) and queue.is_due("a", 0.1)
    queue.charge("b", 1.0)
    assert not queue.is_due("a", 0.1)


def test_an_item_that_is_removed_is_not_taken() -> None:
    queue = TimeShareQueue[int]()
    queue.add("a", 1)
    queue.add("a", 2, first=True)
    assert queue.remove("a", 2) and not queue.remove("a", 2)
    assert queue.take() == ("a", 1) and not queue


def test_what_owners_used_is_forgotten_once_it_makes_no_difference() -> None:
    queue = TimeShareQueue[int]()
    for number in range(100):
        queue.add(str(number), number)
        queue.take()
        queue.charge(str(number), 1.0)
    queue.charge("last", 10.0)
    queue.begin("last")
    assert queue._used_s == {}


def test_a_thread_works_for_the_innermost_owner() -> None:
    assert current_owner() == ""
    with working_for("a"):
        with working_for("b"):
            assert current_owner() == "b"
        assert current_owner() == "a"


def test_whether_items_wait_can_be_read_while_another_thread_changes_the_queue() -> None:
    queue = TimeShareQueue[int]()
    ends = time.monotonic() + 0.3

    def change() -> None:
        while time.monotonic() < ends:
            for owner in "abcdefgh":
                queue.add(owner, 1)
            for owner in "abcdefgh":
                queue.remove(owner, 1)

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        thread = threading.Thread(target=change)
        thread.start()
        read = 0
        while thread.is_alive():
            read += bool(queue) in (True, False)  # counting the items raises here
        assert read > 100 and not queue
    finally:
        sys.setswitchinterval(before)
