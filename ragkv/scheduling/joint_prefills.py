"""Computes the prefills that wait for the model in one pass (CacheBlend figure 15c).

The first prefill to get the compute lock takes along its tenant's other waiting prefills, oldest
first, from any engine on the model. A pass has the prompts of one tenant only, so no prompt waits
for another tenant's rows. The caller computes the pass.
"""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from ragkv.runtime import Claim, FairLock, Wait

P = TypeVar("P")  # a prompt that is ready for its prefill

# The most rows of a pass over several prompts, all of which wait for its end.
JOINT_ROWS = 512


class _WaitingPrompt(Generic[P]):
    """A prompt whose prefill waits; it computes `rows` rows in a layer."""

    def __init__(self, prompt: P, rows: float, tenant: str) -> None:
        self.prompt = prompt
        self.rows = rows
        self.wait = Wait(tenant)
        self.taken = False  # whether a pass of this or another thread has it
        self.done = threading.Event()  # that pass is over


@dataclass(eq=False)
class JointPrefills(Generic[P]):
    """The prefills that wait for one model."""

    lock: FairLock  # held by the thread that computes
    _guard: threading.Lock = field(default_factory=threading.Lock, init=False)
    _waiting: list[_WaitingPrompt[P]] = field(default_factory=list, init=False)

    @property
    def waiting(self) -> int:
        """How many wait."""
        return len(self._waiting)

    @contextmanager
    def joined(self, prompt: P, rows: float, claim: Claim) -> Iterator[Sequence[P]]:
        """The prompts that the block computes, under the lock: `prompt` and others, with at most
        `JOINT_ROWS` rows together. None, if another thread has computed `prompt` meanwhile.

        Raises what `claim.check` raises while it waits.
        """
        own = _WaitingPrompt(prompt, rows, claim.tenant)
        with self._guard:
            self._waiting.append(own)
        try:
            if not self.lock.acquire(own.wait, claim.check):
                own.done.wait()
                yield ()
                return
            joined = [own]
            try:
                self._add_others(joined)
                yield [one.prompt for one in joined]
            finally:
                for one in joined:
                    one.done.set()
                self.lock.release()
        finally:
            with self._guard:
                self._waiting = [other for other in self._waiting if other is not own]
            if own.taken:  # another thread may still compute it, also when this one gave up
                own.done.wait()

    def _add_others(self, joined: list[_WaitingPrompt[P]]) -> None:
        """Add the others of its tenant that fit into a pass with the first prompt of `joined`."""
        (first,) = joined
        with self._guard:
            rows = first.rows
            for one in self._waiting:
                is_its_own = one is not first and one.wait.tenant == first.wait.tenant
                if is_its_own and rows + one.rows <= JOINT_ROWS:
                    joined.append(one)
                    rows += one.rows
            self._waiting = [one for one in self._waiting if one not in joined]
            for one in joined:
                one.taken = True
        self.lock.dismiss(one.wait for one in joined[1:])
