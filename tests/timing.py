"""The time that work takes, for tests of how it grows with its input."""

import gc
import time
from collections.abc import Callable


def processor_seconds(work: Callable[[], object]) -> float:
    """Processor time of one call, without collections of garbage: these walk over all objects of a long test run."""
    gc.disable()
    try:
        began = time.process_time()
        work()
        return time.process_time() - began
    finally:
        gc.enable()
