"""Whose work a request is, what ends it, and since when it runs.

One `Work` is made for each request and passed by hand to everything that waits or computes for it.
"""

import threading
import time
from collections.abc import Callable

from ragkv.errors import CancelledError, DeadlineError
from ragkv.runtime.waiting import POLL_S


class Work:
    """One request's claim on the model."""

    def __init__(
        self,
        owner: str = "",
        deadline_s: float | None = None,
        cancel: threading.Event | None = None,
        ended: Callable[[Exception], None] = lambda _: None,
    ) -> None:
        """`owner` is the tenant that waits and is charged; `deadline_s` counts from now.

        `ended` is called once, with the first error that `check` raises.
        """
        self.owner = owner
        self._deadline_s = deadline_s
        self._cancel = cancel
        self._ended = ended
        self._began = time.perf_counter()
        self._is_over = False

    def elapsed_s(self) -> float:
        """Seconds since the work began."""
        return time.perf_counter() - self._began

    def check(self) -> None:
        """Raise `CancelledError` or `DeadlineError` if the request should not go on."""
        error: CancelledError | DeadlineError
        if self._cancel is not None and self._cancel.is_set():
            error = CancelledError(
                "The request was cancelled by its caller; what it held is released."
            )
        elif self._deadline_s is not None and self.elapsed_s() >= self._deadline_s:
            error = DeadlineError(
                f"The request's deadline of {self._deadline_s:g} s passed; what it held is "
                "released. Give it more time, ask for fewer tokens, or ask again when the queue "
                "is shorter."
            )
        else:
            return
        if not self._is_over:
            self._is_over = True
            self._ended(error)
        try:
            raise error
        finally:
            del error  # Otherwise it and this frame would keep each other, the request and its KV.

    def wait(self, event: threading.Event) -> None:
        """Wait for `event`; raises what `check` raises."""
        may_end = self._cancel is not None or self._deadline_s is not None
        while not event.wait(POLL_S if may_end else None):
            self.check()
