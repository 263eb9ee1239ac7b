"""A pool of open values: how many are open, which are closed, and that one in use is not."""

import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from ragkv.errors import DeadlineError, RagKVError
from ragkv.runtime import OpenPool
from tests.faults import raising
from tests.scheduling.helpers import begin, until


class Openings:
    """Opens values and records which are open."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.seconds = seconds
        self.lock = threading.Lock()
        self.open: Counter[str] = Counter()
        self.most = 0
        self.opened: list[str] = []

    def opener(self, key: str) -> Callable[[], str]:
        def open_value() -> str:
            time.sleep(self.seconds)
            with self.lock:
                self.open[key] += 1
                self.opened.append(key)
                self.most = max(self.most, self.open.total())
            return key

        return open_value

    def close(self, key: str) -> None:
        time.sleep(self.seconds)
        with self.lock:
            self.open[key] -= 1

    @property
    def names(self) -> set[str]:
        return {key for key, count in self.open.items() if count}


def pool_of(openings: Openings, limit: int) -> OpenPool[str, str]:
    return OpenPool(limit, openings.close, group=lambda key: key[0])


def use(pool: OpenPool[str, str], openings: Openings, *keys: str) -> None:
    for key in keys:
        with pool.use(key, openings.opener(key)) as value:
            assert value == key


def test_the_value_that_was_idle_longest_is_closed_for_a_new_one() -> None:
    openings = Openings()
    pool = pool_of(openings, 2)
    use(pool, openings, "a1", "a2", "a1", "a3")
    assert openings.names == {"a1", "a3"} and openings.most == 2


def test_a_group_that_opens_many_values_closes_its_own() -> None:
    openings = Openings()
    pool = pool_of(openings, 4)
    use(pool, openings, "b1", *(f"a{n}" for n in range(20)), "b1")
    assert openings.opened.count("b1") == 1


def test_values_that_keep_too_many_bytes_are_closed_and_one_may_keep_more() -> None:
    openings = Openings()
    pool = OpenPool(9, openings.close, most_bytes=10, bytes_of=lambda key: int(key[1:]))
    use(pool, openings, "a4", "b0", "c6")
    assert openings.names == {"a4", "b0", "c6"}
    use(pool, openings, "d1")
    until(lambda: openings.names == {"b0", "c6", "d1"})  # the one that was idle longest is closed
    use(pool, openings, "e99", "e99")
    until(lambda: openings.names == {"b0", "e99"})
    assert openings.opened.count("e99") == 1
    with pool.use("e99", openings.opener("e99")):
        use(pool, openings, "a4")
        until(lambda: openings.names == {"b0", "e99"})  # one in use stays, and the idle one goes


def test_while_all_are_in_use_one_more_is_open_and_then_the_limit_holds_again() -> None:
    openings = Openings()
    pool = pool_of(openings, 1)
    with pool.use("a1", openings.opener("a1")):
        use(pool, openings, "a2")
        until(lambda: openings.names == {"a1"})
        assert openings.most == 2


def test_a_value_that_takes_long_to_close_delays_only_who_needs_its_place_and_as_long_as_its_check_says() -> (
    None
):
    openings = Openings()
    may_close = threading.Event()

    def close(key: str) -> None:
        assert may_close.wait(60)
        openings.close(key)

    pool = OpenPool[str, str](1, close)
    with pool.use("a", openings.opener("a")):
        use(pool, openings, "b")  # while all are in use it takes no place
    use(pool, openings, "a")
    with (
        pytest.raises(DeadlineError),
        pool.use("c", openings.opener("c"), raising(DeadlineError("on purpose"))),
    ):
        pass
    assert openings.names == {"a", "b"}
    may_close.set()
    use(pool, openings, "c")
    until(lambda: openings.names == {"c"})


def test_a_value_that_cannot_be_opened_takes_no_place() -> None:
    openings = Openings()
    pool = pool_of(openings, 1)
    with (
        pytest.raises(ValueError, match="damaged"),
        pool.use("a1", raising(ValueError("damaged"))),
    ):
        pass
    use(pool, openings, "a2")
    assert pool.opened() == {"a2": "a2"}


def test_closing_one_waits_for_the_last_use_and_closes_the_value() -> None:
    openings = Openings()
    pool = pool_of(openings, 2)
    used = threading.Event()
    ends = threading.Event()

    def hold() -> None:
        with pool.use("a1", openings.opener("a1")):
            used.set()
            ends.wait(60)

    holder = begin(hold)
    used.wait(60)
    closer = begin(pool.close_one, "a1")
    closer.join(0.05)
    assert closer.is_alive() and openings.names == {"a1"}
    pool.close_one("a1", wait=False)  # returns at once
    ends.set()
    closer.join(60)
    assert not closer.is_alive() and openings.names == set()
    holder.join()


def test_who_gives_back_a_leaving_value_does_not_wait_until_it_is_closed() -> None:
    may_close = threading.Event()
    openings = Openings()

    def close(key: str) -> None:
        assert may_close.wait(60)
        openings.close(key)

    pool = OpenPool[str, str](2, close)
    with pool.use("a1", openings.opener("a1")):
        pool.close_one("a1", wait=False)
    assert openings.names == {"a1"}
    may_close.set()
    pool.close_one("a1")
    assert openings.names == set()


def test_without_a_thread_to_close_it_a_value_is_closed_once_by_who_gives_it_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    openings = Openings()
    pool = pool_of(openings, 1)
    monkeypatch.setattr(threading.Thread, "start", raising(RuntimeError("no thread")))
    use(pool, openings, "a1", "a2")
    with pool.use("a2", openings.opener("a2")):
        pool.close_one("a2", wait=False)
    assert openings.open == {"a1": 0, "a2": 0}


def test_closing_the_pool_closes_every_value_and_refuses_new_uses() -> None:
    openings = Openings()
    pool = pool_of(openings, 3)
    use(pool, openings, "a1", "a2")
    pool.close()
    pool.close()
    assert openings.names == set()
    with pytest.raises(RagKVError), pool.use("a1", openings.opener("a1")):
        pass


def test_threads_that_use_and_discard_at_random_find_their_values_open() -> None:
    openings = Openings(0.0002)
    pool = pool_of(openings, 3)

    def run(seed: int) -> None:
        order = random.Random(seed)
        for _ in range(150):
            key = f"{order.choice('ab')}{order.randrange(4)}"
            if order.random() < 0.2:
                pool.close_one(key, wait=order.random() < 0.5)
                continue
            with pool.use(key, openings.opener(key)) as value:
                assert value == key and openings.open[key] == 1
                time.sleep(0.0002)
                assert openings.open[key] == 1

    with ThreadPoolExecutor(6) as threads:
        list(threads.map(run, range(6)))
    until(lambda: len(openings.names) <= 3)
    pool.close()
    assert openings.names == set()
