"""The health of a remote: when its circuit breaker opens and closes, and how fast it is found to
be.
"""

import pytest

from ragkv.cluster.health import (
    FAILURES_TO_OPEN,
    FORGET_SPEED_S,
    LONGEST_PAUSE_S,
    Health,
    SpeedMeter,
)
from ragkv.errors import RemoteError
from tests.faults import raising


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def health(clock: Clock) -> Health:
    return Health("remote", clock=clock)


refuse = raising(RemoteError("refused"))
time_out = raising(RemoteError("timed out", timed_out=True))


def fail(health: Health, times: int = 1) -> None:
    for _ in range(times):
        with pytest.raises(RemoteError, match="refused"):
            health.call(refuse)


def open_breaker(health: Health) -> None:
    with pytest.raises(RemoteError, match="timed out"):
        health.call(time_out)


def test_the_breaker_opens_after_some_failures_in_a_row(health: Health) -> None:
    fail(health, FAILURES_TO_OPEN - 1)
    assert health.call(lambda: "answer") == "answer"
    fail(health, FAILURES_TO_OPEN - 1)
    assert health.available
    fail(health)
    assert not health.available


def test_an_open_breaker_refuses_calls_and_counts_them(health: Health) -> None:
    open_breaker(health)
    with pytest.raises(RemoteError, match="until it answers again"):
        health.call(lambda: pytest.fail("it was called"))
    stats = health.stats(3)
    assert (stats.failures, stats.skipped, stats.pending_deletions) == (1, 1, 3)


def test_a_probe_that_is_answered_closes_the_breaker_and_one_that_fails_doubles_the_pause(
    health: Health, clock: Clock
) -> None:
    open_breaker(health)
    pauses = []
    for _ in range(10):
        pauses.append(health.probe_due_s())
        health.probe(lambda: pytest.fail("too early"))
        clock.now += health.probe_due_s() or 0.0
        health.probe(refuse)
    assert pauses[:4] == [1.0, 2.0, 4.0, 8.0]
    assert pauses[-1] == LONGEST_PAUSE_S
    clock.now += LONGEST_PAUSE_S
    health.probe(lambda: None)
    assert health.available
    assert health.probe_due_s() is None
    open_breaker(health)
    assert health.probe_due_s() == 1.0  # as at first


def test_a_late_answer_to_an_earlier_call_does_not_close_the_breaker(health: Health) -> None:
    health.call(lambda: open_breaker(health))
    assert not health.available


def test_bandwidth_is_measured_over_the_time_in_which_anything_was_read(clock: Clock) -> None:
    meter = SpeedMeter(clock)
    meter.begin_read()
    meter.end_read(0)  # it failed
    assert meter.speed() is None
    meter.begin_read()
    meter.begin_read()
    clock.now = 1.0
    meter.end_read(600)
    clock.now = 2.0
    meter.end_read(400)
    clock.now = 50.0  # nothing was read
    assert meter.speed() == pytest.approx(500)
    clock.now = 2.5 + FORGET_SPEED_S
    assert meter.speed() is None


def test_the_time_without_an_answer_is_counted_from_the_first_failure_to_the_next_answer(
    health: Health, clock: Clock
) -> None:
    assert health.answers and health.stats(0).away_s == 0.0
    clock.now = 10.0
    fail(health)
    clock.now = 13.0
    assert not health.answers and health.stats(0).away_s == 3.0
    health.call(lambda: None)
    clock.now = 20.0
    assert health.answers and health.stats(0).away_s == 3.0
    open_breaker(health)
    clock.now = 25.0
    health.probe(lambda: None)
    clock.now = 30.0
    assert health.stats(0).away_s == 3.0 + 5.0


def test_a_first_failure_is_followed_by_probes_until_one_is_answered_or_the_breaker_opens(
    clock: Clock,
) -> None:
    health = Health("remote", clock=clock, longest_pause_s=2.0)
    assert health.probe_due_s() is None
    fail(health)
    assert health.available and health.probe_due_s() == 1.0
    clock.now += 1.0
    health.probe(lambda: None)
    assert health.answers and health.probe_due_s() is None
    fail(health)
    for _ in range(FAILURES_TO_OPEN - 1):
        clock.now += 2.0
        health.probe(refuse)
    assert not health.available and health.probe_due_s() == 2.0  # the longest pause that was given
