"""How long a request is willing to wait and to compute."""

import threading
import time
from collections.abc import Callable

from ragkv.errors import CancelledError, DeadlineError
from ragkv.runtime.batches import POLL_S


class Ticket:
    """The deadline of one request, and the event that cancels it."""

    def __init__(
        self, deadline_s: float | None, cancel: threading.Event | None, ended: Callable[[Exception], None]
    ) -> None:
        """`ended` is called once, with the first error that `check` raises."""
        self._deadline_s, self._cancel, self._ended = deadline_s, cancel, ended
        self._began = time.monotonic()
        self._over = False

    def check(self) -> None:
        """Raise `CancelledError` or `DeadlineError` if the request should not go on."""
        error: CancelledError | DeadlineError
        if self._cancel is not None and self._cancel.is_set():
            error = CancelledError("The request was cancelled by its caller; what it held is released.")
        elif self._deadline_s is not None and time.monotonic() - self._began >= self._deadline_s:
            error = DeadlineError(
                f"The request's deadline of {self._deadline_s:g} s passed; what it held is released. Give it more "
                "time, ask for fewer tokens, or ask again when the queue is shorter."
            )
        else:
            return
        if not self._over:
            self._over = True
            self._ended(error)
        try:
            raise error
        finally:
            del error  # or it and this frame hold each other, and with them the request and its KV

    def wait(self, event: threading.Event) -> None:
        """Wait for `event`; raises what `check` raises."""
        may_end = self._cancel is not None or self._deadline_s is not None
        while not event.wait(POLL_S if may_end else None):
            self.check()
