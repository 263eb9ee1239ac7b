"""Progress where no terminal shows a bar: lines in a log."""

import time
from types import SimpleNamespace

import pytest

from ragkv.cli import output
from ragkv.runtime import Rate, rates


def test_work_that_takes_longer_is_named_in_a_log(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with output.working("loading"):
        pass
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(output, "FIRST_LINE_S", 0.0)
    said = ""
    with output.working("loading"):
        deadline = time.monotonic() + 30
        while not said and time.monotonic() < deadline:
            said = capsys.readouterr().err
    assert said == "loading ...\n"


def test_progress_is_written_into_a_log_at_intervals(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with output.progress("encoding KV") as short:
        short(1, 4)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(output, "FIRST_LINE_S", 0.0)
    with output.progress("encoding KV") as long:
        for done in range(1, 5):
            long(done, 4)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("encoding KV: 1 of 4")
    with output.progress("encoding KV") as long:
        monkeypatch.setattr(output, "LINE_EVERY_S", 0.0)
        long(1, 4)
        long(2, 4)
    assert len(capsys.readouterr().err.splitlines()) == 2


def test_the_time_left_counts_no_time_before_the_first_of_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    times = iter((0.0, 40.0, 41.0))
    monkeypatch.setattr(rates, "time", SimpleNamespace(monotonic=lambda: next(times)))
    rate = Rate()
    for done in (0, 10, 20):
        rate.update(done, 50)
    assert (rate.per_s, rate.left) == (10.0, ", about 3.0 s left")
