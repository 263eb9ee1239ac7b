"""The scheduler decides which request computes with the model now (CachedAttention section 3.3).

The callers' threads do the work. An admission covers planning and prefill. One admitted request
computes while the others look up and read ahead (section 3.2.1). Decoding needs no admission, so an
open stream delays no other request. However a request ends, what it held is released.

Engines on one model have a scheduler each, with its own queue, and share the `SharedCompute`. The
scheduler knows no prompts and no background work (`idle_time.py`). docs/research/scheduler.md has a
drawing.
"""

import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ragkv.config import SchedulerConfig
from ragkv.errors import CancelledError, DeadlineError, QueueFullError, RagKVError
from ragkv.model import Adapter
from ragkv.runtime import Check, Claim, FairLock, ThreadChoice, no_check
from ragkv.runtime.waiting import POLL_S
from ragkv.store.prefetch import Prefetcher, PrefetchHint

from .decode_batch import DecodeBatch
from .joint_prefills import JointPrefills
from .queue_stats import QueueStats

# Short prompts are admitted beyond `workers` while all admitted prompts together have at most so
# many tokens. They plan and read ahead, and then share a pass.
JOINT_TOKENS = 8192
# So many requests of one tenant are prepared while other tenants compute.
PREPARED_AHEAD = 4


class SharedCompute:
    """What the engines on one model share: who computes now, the decode batch, and how many
    requests run.
    """

    def __init__(self, adapter: Adapter) -> None:
        on_cpu = adapter.device.type == "cpu"
        self.threads = ThreadChoice(torch.get_num_threads() if on_cpu else 1)
        # only the thread that computes keeps an OpenMP pool
        self.lock = FairLock(self.threads.end, self.threads.begin)
        # held by who encodes: one of them waits for the model, so a request waits for one chunk
        self.encoding = FairLock()
        self.batch = DecodeBatch(adapter, self.lock)
        self.prefills = JointPrefills[Any](self.lock)
        self.requests = Counter[str]()  # now running, by tenant
        # guards `requests`; told as well when a request has left a queue
        self.changed = threading.Condition()

    @contextmanager
    def running(self, tenant: str) -> Iterator[None]:
        """A request of `tenant` runs on the model inside the block."""
        with self.changed:
            self.requests[tenant] += 1
        try:
            yield
        finally:
            with self.changed:
                self.requests -= Counter([tenant])  # forgets a tenant at 0
                self.changed.notify_all()


class _Admission:
    """A request in the queue, later among those that run; its prompt has `tokens` tokens."""

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens
        self.admitted = threading.Event()


class Scheduler:
    """One engine's queue of requests."""

    def __init__(
        self,
        compute: SharedCompute,
        config: SchedulerConfig,
        prefetcher: Prefetcher,
        tenant: str = "",
    ) -> None:
        """`prefetcher` learns which requests wait. All work waits, and is charged, for `tenant`."""
        self.tenant = tenant
        self._compute = compute
        self._config = config
        self._prefetcher = prefetcher
        # where requests are computed together
        self.batch = compute.batch
        self.prefills = compute.prefills
        self._lock = threading.Lock()
        self._waiting: deque[_Admission] = deque()
        self._running: set[_Admission] = set()
        self._served = self._refused = self._expired = self._cancelled = 0
        self._closed = False

    @contextmanager
    def request(self) -> Iterator[None]:
        """A request runs inside the block, and background work waits. A deadline that passed or a
        cancellation that ends the block is counted.
        """
        try:
            with self._compute.running(self.tenant):
                yield
        except (DeadlineError, CancelledError) as error:
            with self._lock:
                self._expired += isinstance(error, DeadlineError)
                self._cancelled += isinstance(error, CancelledError)
            raise

    @contextmanager
    def admitted(
        self,
        claim: Claim,
        tokens: int = JOINT_TOKENS,
        hint: Callable[[], PrefetchHint] = PrefetchHint,
    ) -> Iterator[None]:
        """Wait to be admitted; the prompt has `tokens` tokens. Only a request that has to wait
        makes its `hint`, and the store knows the hint until the block ends.

        Raises what `claim.check` raises, and `QueueFullError` at once if too many wait.
        """
        claim.check()
        admission = _Admission(tokens)
        if self._admitted_at_once(admission):
            hinted = None
        else:
            hinted = hint()
            self._join(admission, hinted)
        try:
            if hinted is not None:
                claim.wait(admission.admitted)
                claim.check()
                self._prefetcher.started(hinted)
            yield
            with self._lock:
                self._served += 1
        finally:
            if hinted is not None:
                self._prefetcher.left(hinted)
            self._leave(admission)

    def wait_for_room(self, check: Check) -> None:
        """Return when the next prompt should be prepared. What `check` raises ends the wait.

        While other tenants have requests, only a few requests of one tenant wait for the model.
        """
        changed = self._compute.changed
        while True:
            with changed:
                if changed.wait_for(self._may_prepare, POLL_S):
                    return
            check()

    def _may_prepare(self) -> bool:
        """The caller holds `SharedCompute.changed`."""
        others = self._compute.requests.keys() - {self.tenant}
        return not others or len(self._running) + len(self._waiting) < PREPARED_AHEAD

    @contextmanager
    def computing(self, check: Check = no_check) -> Iterator[None]:
        """Compute with the model inside the block. Raises what `check` raises, and `RagKVError`
        once closed.
        """
        with self._compute.lock.hold(self.tenant, check=check):
            self._check_open()
            yield

    def between_layers(self) -> None:
        """Let requests that wait for a token decode a step, then let tenants that used less time
        compute first.

        The thread that computes calls this between two layers. Raises `RagKVError` if the engine
        was closed.
        """
        if self._compute.batch.waiting:  # read without a lock: usually no request waits
            self._compute.batch.step_waiting()
        self._compute.lock.give_way()
        self._compute.threads.begin()
        self._check_open()

    def stats(self) -> QueueStats:
        """The queue now, and counts."""
        with self._lock:
            counts = self._served, self._refused, self._expired, self._cancelled
            return QueueStats(len(self._waiting), len(self._running), *counts)

    def close(self) -> None:
        """Wait for the pass under way to end, and allow no other. Answers that decode already go
        on.
        """
        with self._compute.lock.hold(self.tenant):
            self._closed = True

    def _check_open(self) -> None:
        if self._closed:
            raise RagKVError("The engine is closed; build a new one.")

    def _admitted_at_once(self, admission: _Admission) -> bool:
        """Admit `admission` if none waits and there is room. Raises `QueueFullError`."""
        with self._lock:
            may_start = not self._waiting and self._has_room(admission)
            if may_start:
                self._running.add(admission)
            else:
                self._refuse_beyond_limit(admission)
        return may_start

    def _refuse_beyond_limit(self, admission: _Admission) -> None:
        """Raise `QueueFullError` if `admission` had to wait behind too many. The caller
        holds `_lock`.
        """
        limit = self._config.queue_limit
        if (self._waiting or not self._has_room(admission)) and len(self._waiting) >= limit:
            self._refused += 1
            raise QueueFullError(
                f"{len(self._waiting)} requests wait and the queue takes {limit}. Ask again "
                "later, or raise scheduler.queue_limit."
            )

    def _join(self, admission: _Admission, hint: PrefetchHint) -> None:
        with self._lock:
            self._refuse_beyond_limit(admission)  # again, because others may have joined meanwhile
            # under the lock, so that the store sees the requests in this queue's order
            self._prefetcher.queued(hint)
            self._waiting.append(admission)
            self._admit()

    def _admit(self) -> None:
        """Admit those that wait, in their order, as far as there is room. The caller holds
        `_lock`.
        """
        while self._waiting and self._has_room(self._waiting[0]):
            admission = self._waiting.popleft()
            self._running.add(admission)
            admission.admitted.set()

    def _has_room(self, admission: _Admission) -> bool:
        """Whether `admission` may be admitted now: a worker is free, or its prompt is short. The
        caller holds `_lock`.
        """
        workers = self._config.workers
        running = len(self._running)
        return running < workers or (
            workers > 1 and sum(one.tokens for one in (admission, *self._running)) <= JOINT_TOKENS
        )

    def _leave(self, admission: _Admission) -> None:
        with self._lock:
            if admission in self._running:
                self._running.remove(admission)
            else:
                self._waiting.remove(admission)
            self._admit()
        with self._compute.changed:
            self._compute.changed.notify_all()
