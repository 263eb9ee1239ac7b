"""The time that work takes, for tests of how it grows with its input."""

import gc
import time
from collections.abc import Callable


def processor_seconds(work: Callable[[], object]) -> float:
    """Processor time of one call, without collections of garbage, which walk over all objects, and
    without threads.
    """
    gc.disable()
    try:
        began = time.thread_time()
        work()
        return time.thread_time() - began
    finally:
        gc.enable()


def assert_linear(seconds: Callable[[int], float], size: int) -> None:
    """Eight times the input takes less than 16 times as long. Quadratic work takes 64 times as
    long.

    Below 20 ms no growth is seen: a call has costs of its own.
    """
    assert seconds(8 * size) < 16 * max(seconds(size), 0.02)
