"""Work that nobody waits for goes on a thread. If the system has none to give, no request fails."""

import threading

import pytest

from ragkv import Engine
from ragkv.runtime import begun, close_elsewhere
from tests import tiny_models
from tests.faults import raising

NO_THREAD = RuntimeError("can't start new thread")


def test_a_thread_runs_its_work() -> None:
    ran: list[str] = []
    thread = begun(lambda: ran.append(threading.current_thread().name), "worker", "nothing runs")
    assert thread is not None and thread.daemon
    thread.join()
    assert ran == ["worker"]


def test_work_without_a_thread_is_told_and_left(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ran: list[int] = []
    monkeypatch.setattr(threading.Thread, "start", raising(NO_THREAD))
    assert begun(lambda: ran.append(1), "worker", "what waits stays a miss") is None
    assert "worker" in caplog.text and "what waits stays a miss" in caplog.text
    assert not ran


def test_what_should_be_closed_elsewhere_is_closed_here_without_a_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    closed: list[int] = []
    monkeypatch.setattr(threading.Thread, "start", raising(NO_THREAD))
    close_elsewhere(lambda: closed.append(1))
    assert closed == [1]


def test_an_engine_opens_and_closes_without_a_thread_for_its_profile(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with Engine(tiny_models.model("llama")) as engine:
        profiler = engine.parts.profiler
        with monkeypatch.context() as patch:
            patch.setattr(profiler.in_use, "profile", None)  # one may be in the cache folder
            patch.setattr(threading.Thread, "start", raising(NO_THREAD))
            profiler.start()
    assert "`ragkv profile` measures one" in caplog.text
