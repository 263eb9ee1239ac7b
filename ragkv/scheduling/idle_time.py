"""Lets work that is no request use the model while no request runs, or wait for its turn.

Encoding chunks and measuring a profile are such work, and so is preparing a prompt. Requests never
use this module; they use `scheduler.py`.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from ragkv.runtime import Check, no_check
from ragkv.runtime.waiting import POLL_S

from .scheduler import Scheduler, SharedCompute

# So many requests of one tenant are prepared while other tenants compute.
PREPARED_AHEAD = 4


@dataclass(frozen=True, slots=True, eq=False)
class IdleTime:
    """The time in which one engine's work that is no request may compute. All methods are thread-safe."""

    compute: SharedCompute  # of the model
    scheduler: Scheduler  # of the engine

    @contextmanager
    def encoding(self, check: Check = no_check) -> Iterator[None]:
        """Encode one batch of chunks inside the block. Raises what `Scheduler.computing` raises."""
        with (
            self.compute.encoding.hold(self.scheduler.owner, check=check),
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

    def wait_for_room(self, check: Check) -> None:
        """Return when the next prompt should be prepared. What `check` raises ends the wait.

        While other tenants have requests, only a few requests of one tenant wait for the model.
        """
        changed = self.compute.changed
        while True:
            with changed:
                if changed.wait_for(self._may_prepare, POLL_S):
                    return
            check()

    def _may_prepare(self) -> bool:
        """Needs the model's `changed`."""
        if not self.compute.requests.keys() - {self.scheduler.owner}:
            return True
        queue = self.scheduler.stats()
        return queue.admitted + queue.waiting < PREPARED_AHEAD

    def wake(self) -> None:
        """Wake the threads in `wait_idle`, so that they ask `hurried` again."""
        with self.compute.changed:
            self.compute.changed.notify_all()
