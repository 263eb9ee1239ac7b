"""A bandwidth that several transfers share."""

import threading
import time


class SharedBandwidth:
    """Transfers go one after the other, in the order they were asked for. Thread-safe."""

    def __init__(self) -> None:
        self._free_at = 0.0  # when all transfers asked for so far will be through, on the monotonic clock
        self._lock = threading.Lock()

    def due_at(self, size_bytes: int, bytes_per_s: float) -> float:
        """Add a transfer; the monotonic time at which it will be through."""
        with self._lock:
            self._free_at = max(self._free_at, time.monotonic()) + size_bytes / bytes_per_s
            return self._free_at


def sleep_until(due_at: float) -> None:
    """Sleep until the monotonic time `due_at`, not at all if it is past."""
    time.sleep(max(0.0, due_at - time.monotonic()))
