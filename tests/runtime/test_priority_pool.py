"""The priority thread pool: the order of its jobs, and what becomes of them when it closes."""

import threading

from ragkv.runtime import PriorityThreadPool


def test_the_job_with_the_lowest_number_runs_first() -> None:
    pool, go, done = PriorityThreadPool(1, "pool"), threading.Event(), list[int]()
    busy = pool.submit(0, go.wait)
    jobs = [pool.submit(priority, lambda number=priority: done.append(number)) for priority in (5, 1, 3, 1)]  # type: ignore[misc]
    go.set()
    for job in (busy, *jobs):
        job.result(10)
    assert done == [1, 1, 3, 5]
    pool.close()


def test_closing_cancels_queued_jobs_and_the_running_one_hands_its_error_over() -> None:
    pool, go, started = PriorityThreadPool(1, "pool"), threading.Event(), threading.Event()

    def fail() -> None:
        started.set()
        go.wait(60)
        raise ValueError("on purpose")

    busy, queued = pool.submit(0, fail), pool.submit(0, lambda: None)
    assert started.wait(60)
    closing = threading.Thread(target=pool.close)
    closing.start()
    go.set()
    closing.join(60)
    assert isinstance(busy.exception(10), ValueError)
    assert queued.cancelled()
    assert pool.submit(0, lambda: None).cancelled()
