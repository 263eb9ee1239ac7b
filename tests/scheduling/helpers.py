"""Helpers for tests with threads."""

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

from ragkv import Engine


def between_layers(
    monkeypatch: pytest.MonkeyPatch, engine: Engine, step: Callable[[], object]
) -> None:
    """Have `step` called between two layers, as if requests waited for a token there."""
    always = SimpleNamespace(waiting=[1], step_waiting=step)
    monkeypatch.setattr(engine.model.compute, "batch", always)


def begin(work: Callable[..., object], *arguments: Any) -> threading.Thread:
    """A thread that runs `work` from now on."""
    thread = threading.Thread(target=work, args=arguments)
    thread.start()
    return thread


def together(calls: Sequence[Callable[[], Any]], timeout_s: float = 60.0) -> list[Any]:
    """The results of calls that run at the same time, each on its own thread; raises what one of
    them raised.
    """
    start = threading.Barrier(len(calls))

    def run(call: Callable[[], Any]) -> Any:
        start.wait(60)
        return call()

    with ThreadPoolExecutor(len(calls)) as pool:
        return list(pool.map(run, calls, timeout=timeout_s))


def until(
    condition: Callable[[], object], timeout_s: float = 60.0, every_s: float = 0.0005
) -> None:
    """Wait until `condition` is true; fail after `timeout_s`."""
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "the condition did not become true in time"
        time.sleep(every_s)
