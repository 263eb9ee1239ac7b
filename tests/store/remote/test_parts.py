"""The small parts, each alone: breaker, pool, meter, values."""

import threading
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragkv.errors import EntryDamagedError, RemoteError
from ragkv.runtime import PriorityThreadPool
from ragkv.store.encoded import EncodedEntry
from ragkv.store.remote import Breaker, Seal, State, values
from ragkv.store.remote.breaker import FAILURES, LONGEST_PAUSE_S
from ragkv.store.remote.meter import FORGET_S, Meter

from ..entries import make_entry


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def fail() -> None:
    raise RemoteError("no")


class TestBreaker:
    def test_opens_after_some_failures_in_a_row(self) -> None:
        breaker = Breaker(clock=Clock())
        for _ in range(FAILURES - 1):
            breaker.failed()
        breaker.succeeded()
        for _ in range(FAILURES - 1):
            assert not breaker.failed()
        assert breaker.admits()
        assert breaker.failed()
        assert not breaker.admits()

    def test_opens_at_once_when_an_answer_timed_out(self) -> None:
        breaker = Breaker(clock=Clock())
        assert breaker.failed(timed_out=True)
        assert breaker.state is State.OPEN

    def test_a_probe_in_time_closes_it_and_one_that_fails_doubles_the_pause(self) -> None:
        clock = Clock()
        breaker = Breaker(1.0, clock)
        breaker.failed(timed_out=True)
        pauses = []
        for _ in range(10):
            pauses.append(breaker.due_s())
            assert not breaker.probe(lambda: None)  # too early
            clock.now += breaker.due_s() or 0.0
            assert not breaker.probe(fail)
        assert pauses[:4] == [1.0, 2.0, 4.0, 8.0]
        assert pauses[-1] == LONGEST_PAUSE_S
        clock.now += LONGEST_PAUSE_S
        assert breaker.probe(lambda: None)
        assert breaker.admits()
        assert breaker.due_s() is None
        breaker.failed(timed_out=True)
        assert breaker.due_s() == 1.0  # as at first

    def test_while_the_probe_is_under_way_nobody_else_asks(self) -> None:
        clock = Clock()
        breaker = Breaker(1.0, clock)
        breaker.failed(timed_out=True)
        clock.now = 1.0
        seen: list[Any] = []
        breaker.probe(lambda: seen.append((breaker.state, breaker.admits(), breaker.probe(fail))))
        assert seen == [(State.HALF_OPEN, False, False)]

    def test_a_late_answer_does_not_close_it(self) -> None:
        breaker = Breaker(clock=Clock())
        breaker.failed(timed_out=True)
        breaker.succeeded()
        assert not breaker.admits()


class TestLanes:
    def test_the_first_layers_come_first(self) -> None:
        pool, go, done = PriorityThreadPool(1, "lane"), threading.Event(), list[int]()
        busy = pool.submit(0, go.wait)
        jobs = [pool.submit(order, lambda order=order: done.append(order)) for order in (5, 1, 3, 1)]  # type: ignore[misc]
        go.set()
        for job in (busy, *jobs):
            job.result(10)
        assert done == [1, 1, 3, 5]
        pool.close()

    def test_what_waits_when_they_close_is_cancelled_and_an_error_is_handed_over(self) -> None:
        pool, go, here = PriorityThreadPool(1, "lane"), threading.Event(), threading.Event()
        busy = pool.submit(0, lambda: (here.set(), go.wait(10), fail()))
        waiting = pool.submit(0, lambda: None)
        assert here.wait(10)
        closing = threading.Thread(target=pool.close)
        closing.start()
        go.set()
        closing.join(10)
        assert isinstance(busy.exception(10), RemoteError)
        assert waiting.cancelled()
        assert pool.submit(0, lambda: None).cancelled()


class TestMeter:
    def test_counts_the_time_in_which_anything_was_read(self) -> None:
        clock = Clock()
        meter = Meter(clock)
        assert meter.speed() is None
        meter.begin()
        meter.begin()
        clock.now = 1.0
        meter.end(600)
        clock.now = 2.0
        meter.end(400)
        clock.now = 50.0  # nothing was read
        speed = meter.speed()
        assert speed is not None and speed.bytes_per_s == pytest.approx(500)

    def test_forgets(self) -> None:
        clock = Clock()
        meter = Meter(clock)
        meter.begin()
        clock.now = 1.0
        meter.end(100)
        clock.now = 1.5 + FORGET_S
        assert meter.speed() is None

    def test_a_read_that_failed_is_no_measurement(self) -> None:
        meter = Meter(Clock())
        meter.begin()
        meter.end(0)
        assert meter.speed() is None


class TestValues:
    @pytest.mark.parametrize(("group_bytes", "groups"), [(1, 12), (128, 12), (129, 6), (1024, 2), (10**9, 1)])
    def test_a_group_is_as_few_layers_as_make_its_bytes(self, group_bytes: int, groups: int) -> None:
        entry = EncodedEntry.of(make_entry(1, layers=12))  # of 128 bytes each
        assert len(values.pack(entry, group_bytes, Seal())) == groups

    @pytest.mark.parametrize("secret", [None, "secret"])
    @given(data=st.data())
    def test_no_changed_byte_passes(self, secret: str | None, data: st.DataObject) -> None:
        seal, entry = Seal(secret), make_entry(1, layers=3)
        packed = values.pack(EncodedEntry.of(entry), 1, seal)
        group = data.draw(st.integers(0, 2))
        changed = bytearray(packed[group])
        at = data.draw(st.integers(0, len(changed) - 1))
        changed[at] ^= data.draw(st.integers(1, 255))
        head = values.head_of(entry.info.key, values.parse(entry.info.key, packed[0], seal))
        with pytest.raises(EntryDamagedError):
            value = values.parse(entry.info.key, bytes(changed), seal)
            head.check(value, group)
            value.check(entry.info.key, changed[value.start :], seal)

    def test_equal_bytes_are_one_edition_and_others_are_not(self) -> None:
        def edition(number: int, group_bytes: int = 1) -> bytes:
            packed = values.pack(EncodedEntry.of(make_entry(number, layers=3)), group_bytes, Seal())
            return values.parse(make_entry(number, layers=3).info.key, packed[0], Seal()).edition

        assert edition(1) == edition(1)
        assert len({edition(1), edition(2), edition(1, 200)}) == 3
