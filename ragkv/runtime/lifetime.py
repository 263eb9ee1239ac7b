"""Resources that are closed when their `with` block ends, those that nobody closed, and threads for
work that nobody waits for. Pure Python.
"""

import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Self

log = logging.getLogger(__name__)


class Closing(ABC):
    """A resource: use it as a context manager, or close it."""

    @abstractmethod
    def close(self) -> None:
        """Release the resource. A second call does nothing, as with every `close` of ragkv."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def close_dropped(what: str, close: Callable[[], None]) -> None:
    """Close the parts of a resource that nobody closed: the process ends, or nobody holds it any
    more. For `weakref.finalize`; `what` names it in the log, and `close` must not refer to it.
    """
    if not threading.main_thread().is_alive():  # the process ends
        close()
        return
    log.warning("%s was dropped without being closed, and is closed now: call its `close`.", what)
    # The garbage collector may call this in a thread that holds a lock which closing waits for.
    close_elsewhere(close)


def close_elsewhere(close: Callable[[], None]) -> None:
    """Call `close` on a thread of its own, for which the process waits at its end; here, if the
    system has no thread to give.
    """
    try:
        threading.Thread(target=close, name="ragkv-closer").start()
    except RuntimeError:
        close()


def begun(run: Callable[[], object], name: str, otherwise: str) -> threading.Thread | None:
    """A daemon thread that runs `run`; `None` if the system has no thread to give.

    That is no error of the request which happens to begin the thread. It is logged with
    `otherwise`, which says what becomes of the work.
    """
    thread = threading.Thread(target=run, name=name, daemon=True)
    try:
        thread.start()
    except RuntimeError as error:
        log.warning("The thread %s cannot begin (%s): %s.", name, error, otherwise)
        return None
    return thread
