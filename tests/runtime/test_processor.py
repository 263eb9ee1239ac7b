"""A hint where several computing threads share full processors."""

import logging

import pytest

from ragkv.runtime import processor


@pytest.mark.parametrize(
    ("threads", "load", "said"), [(2, 6.5, True), (2, 3.0, True), (2, 2.4, False), (1, 6.5, False), (2, None, False)]
)
def test_threads_on_full_processors_are_named_with_the_load(threads: int, load: float | None, said: bool) -> None:
    found = processor.crowding_hint(threads, load, 2)
    assert (found is not None) == said
    if found is not None:
        assert f"{threads} threads" in found and f"load {load} on 2" in found and "OMP_NUM_THREADS=1" in found


def test_the_hint_is_logged_once_and_the_load_read_every_half_minute(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now, loads = [100.0], iter([1.0, 9.0])
    monkeypatch.setattr(processor.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(processor, "cores", lambda: 2)
    monkeypatch.setattr(processor, "load", lambda: next(loads))  # a third look would end in StopIteration
    notice = processor.CrowdingNotice()
    with caplog.at_level(logging.WARNING, logger=processor.log.name):
        for now[0] in (100.0, 120.0, 131.0, 200.0):
            notice.look(2)
    assert [record.message.split(" while")[0] for record in caplog.records] == ["torch computes on 2 threads"]
