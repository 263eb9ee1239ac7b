"""Tasks pause between batches while answers run, and go on at once when none does."""

import threading
import time
from typing import Any, cast

import pytest

from ragkv.api.work.task_pauses import BATCH_S, PAUSE_SHARE, REQUEST_S, TaskPauses
from ragkv.api.work.work_context import WorkContext
from ragkv.config import SchedulerConfig
from ragkv.errors import CancelledError
from ragkv.scheduling import ModelTurns, Scheduler


def compute(seconds: float) -> None:
    ends = time.thread_time() + seconds
    while time.thread_time() < ends:
        pass


def scheduler_of_nothing() -> Scheduler:
    return Scheduler(ModelTurns(cast(Any, None)), SchedulerConfig(), cast(Any, None))


def context() -> WorkContext:
    return WorkContext(cast(Any, None), None)


def timed(call: Any) -> float:
    began = time.monotonic()
    call()
    return time.monotonic() - began


def test_a_task_pauses_for_a_multiple_of_what_it_computed_only_while_an_answer_runs() -> None:
    scheduler, pauses = scheduler_of_nothing(), TaskPauses()
    with pauses.task(context(), scheduler, "a") as check:
        compute(0.1)
        assert timed(check) < PAUSE_SHARE * 0.1
        with scheduler.request():
            compute(0.1)
            assert timed(check) >= PAUSE_SHARE * 0.1
            assert timed(check) < PAUSE_SHARE * 0.1


def test_the_next_task_of_a_tenant_pauses_for_what_its_last_one_computed() -> None:
    scheduler, pauses = scheduler_of_nothing(), TaskPauses()
    with scheduler.request():
        with pauses.task(context(), scheduler, "a"):
            compute(0.1)
        began = time.monotonic()
        with pauses.task(context(), scheduler, "b"):
            assert time.monotonic() - began < PAUSE_SHARE * 0.1
        began = time.monotonic()
        with pauses.task(context(), scheduler, "a"):
            assert time.monotonic() - began >= PAUSE_SHARE * 0.1


def test_a_tenant_pauses_for_its_many_small_tasks_too() -> None:
    scheduler, pauses, tasks = scheduler_of_nothing(), TaskPauses(), 20
    enough = round(BATCH_S / REQUEST_S)  # tasks, before a pause is worth it

    def run(tasks: int) -> None:
        for _ in range(tasks):
            with pauses.task(context(), scheduler, "a"):
                pass

    with scheduler.request():
        assert timed(lambda: run(tasks)) >= PAUSE_SHARE * REQUEST_S * (tasks - enough)


def test_a_task_whose_pause_ends_with_the_last_answer_goes_on_at_once() -> None:
    scheduler, pauses = scheduler_of_nothing(), TaskPauses()
    done = threading.Event()

    def answer() -> None:
        with scheduler.request():
            done.wait(60)

    thread = threading.Thread(target=answer)
    thread.start()
    with pauses.task(context(), scheduler, "a") as check:
        compute(1.0)
        threading.Timer(0.1, done.set).start()
        assert timed(check) < PAUSE_SHARE * 1.0
    thread.join()


def test_a_cancelled_task_ends_at_its_next_check() -> None:
    work = context()
    with pytest.raises(CancelledError), TaskPauses().task(work, scheduler_of_nothing(), "a") as check:
        work.cancelled.set()
        check()
