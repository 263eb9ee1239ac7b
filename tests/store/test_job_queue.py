"""Jobs of the background thread: a failed one is logged, and the next one runs."""

import logging
import threading
import time

import pytest

from ragkv.errors import EntryUnreachableError
from ragkv.store.entry import EntryKey
from ragkv.store.job_queue import Job, JobQueue
from tests.faults import raising
from tests.scheduling.helpers import begin, until


@pytest.mark.parametrize(
    ("error", "level"),
    [
        (EntryUnreachableError(EntryKey("k" * 64), "Redis went away"), "WARNING"),
        (KeyError("x"), "ERROR"),
    ],
)
def test_a_failed_job_is_logged_and_the_next_one_runs(
    error: Exception, level: str, caplog: pytest.LogCaptureFixture
) -> None:
    ran = []
    worker = JobQueue[None](100, "worker")
    with caplog.at_level(logging.WARNING):
        assert worker.submit(Job(raising(error), EntryKey("k" * 64), 10)) and worker.submit(
            Job(lambda: ran.append(1))
        )
        worker.close()
    assert ran == [1]
    (record,) = caplog.records
    assert record.levelname == level and "kkkkkkkkkkkk" in record.getMessage()


def test_a_job_is_refused_if_no_thread_can_begin_and_nothing_waits_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    worker = JobQueue[None](100, "worker")
    ran = []
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", raising(RuntimeError("can't start new thread")))
        assert not worker.submit(Job(lambda: ran.append(1), size_bytes=10))
    assert worker.pending_bytes == 0
    worker.flush()
    assert worker.submit(Job(lambda: ran.append(2)))
    worker.close()
    assert ran == [2]


def test_a_flush_waits_for_what_was_there_and_what_that_submits_and_for_nothing_later() -> None:
    worker = JobQueue[None](100, "worker")
    begun = threading.Event()
    may_end = threading.Event()
    child_runs = threading.Event()
    child_may_end = threading.Event()

    def child() -> None:
        child_runs.set()
        child_may_end.wait(60)

    def first() -> None:
        begun.set()
        may_end.wait(60)
        worker.submit(Job(child))

    def endless() -> None:
        if not closing.is_set():
            worker.submit(Job(endless))

    closing = threading.Event()
    worker.submit(Job(first))
    assert begun.wait(60)
    flushing = begin(worker.flush)
    until(lambda: worker._flushes == 1)
    worker.submit(Job(endless))  # from now on the queue is never empty
    may_end.set()
    assert child_runs.wait(60)
    flushing.join(0.3)
    waits_for_child = flushing.is_alive()
    child_may_end.set()
    flushing.join(60)
    ended = not flushing.is_alive()
    closing.set()
    worker.close()
    assert waits_for_child and ended


def test_a_flush_ends_when_the_jobs_it_waits_for_are_dropped() -> None:
    worker = JobQueue[None](100, "worker")
    key = EntryKey("k" * 64)
    may_end = threading.Event()
    worker.submit(Job(lambda: may_end.wait(60)))
    worker.submit(Job(lambda: None, key))
    flushing = begin(worker.flush)
    until(lambda: worker._flushes == 1)
    assert worker.cancel(key)
    may_end.set()
    flushing.join(60)
    assert not flushing.is_alive()
    worker.close()


def test_work_that_holds_no_memory_is_taken_while_the_queue_is_over_its_size() -> None:
    may_end = threading.Event()
    ran = []
    worker = JobQueue[None](100, "worker")
    assert worker.submit(Job(lambda: may_end.wait(60), size_bytes=101), wait_s=1.0)
    assert not worker.submit(Job(lambda: ran.append("holds memory"), size_bytes=1))
    assert worker.submit(Job(lambda: ran.append("holds none")))
    may_end.set()
    worker.close()
    assert ran == ["holds none"]


def test_a_wait_for_room_ends_once_it_is_over() -> None:
    worker = JobQueue[None](10, "test")
    may_end = threading.Event()
    assert worker.submit(Job(lambda: may_end.wait(60), size_bytes=10))
    looks = iter([False, False, True])
    began_s = time.monotonic()
    try:
        assert not worker.submit(Job(lambda: None, size_bytes=1), 60.0, lambda: next(looks))
        assert time.monotonic() - began_s < 30.0
    finally:
        may_end.set()
        worker.close()
