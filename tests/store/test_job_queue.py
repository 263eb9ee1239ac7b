"""Jobs of the background thread: a failed one is logged, and the next one runs."""

import logging

import pytest

from ragkv.errors import EntryUnreachableError
from ragkv.store import EntryKey
from ragkv.store.job_queue import Background, Job
from tests.faults import raising


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
    worker = Background[None](100, "worker")
    with caplog.at_level(logging.WARNING):
        assert worker.submit(Job(raising(error), EntryKey("k" * 64), 10)) and worker.submit(
            Job(lambda: ran.append(1))
        )
        worker.close()
    assert ran == [1]
    (record,) = caplog.records
    assert record.levelname == level and "kkkkkkkkkkkk" in record.getMessage()
