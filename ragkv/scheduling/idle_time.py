"""Lets background work use the model while no request runs.

Encoding chunks and measuring a profile are such work. Requests never use this module; they use
`scheduler.py`.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from ragkv.runtime import Check, no_check

from .scheduler import Scheduler, SharedCompute


@dataclass(frozen=True, slots=True, eq=False)
class IdleTime:
    """The time in which one engine's work that is no request may compute."""

    compute: SharedCompute  # of the model
    scheduler: Scheduler  # of the engine

    @contextmanager
    def encoding(self, check: Check = no_check) -> Iterator[None]:
        """Encode one batch of chunks inside the block. Raises what `Scheduler.computing` raises."""
        with (
            self.compute.encoding.hold(self.scheduler.tenant, check=check),
            self.scheduler.computing(check),
        ):
            yield

    @property
    def busy(self) -> bool:
        """Whether a request runs on the model, of this engine or of another one."""
        return bool(self.compute.requests)

    def wait_idle(self, timeout_s: float, hurried: Callable[[], bool]) -> None:
        """Return when no request runs, when `hurried` is true after a `wake`, or after
        `timeout_s`.
        """
        with self.compute.changed:
            self.compute.changed.wait_for(lambda: not self.busy or hurried(), timeout_s)

    def wake(self) -> None:
        """Wake the threads in `wait_idle`, so that they ask `hurried` again."""
        with self.compute.changed:
            self.compute.changed.notify_all()
