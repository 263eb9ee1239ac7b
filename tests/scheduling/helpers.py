"""Helpers for tests with threads."""

import time
from collections.abc import Callable


def until(condition: Callable[[], object], timeout_s: float = 60.0) -> None:
    """Wait until `condition` is true; fail after `timeout_s`."""
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "the condition did not become true in time"
        time.sleep(0.0005)
