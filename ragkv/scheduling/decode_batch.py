"""The decode batch: requests that wait for a token decode together. It has no thread: one of the
waiting requests does the work.

A request takes a decode slot. After each token it asks for the next logits. The first request that
acquires the compute lock runs one step for all requests that wait at that moment, and hands the
others their logits. So requests join and leave at any step. A slow consumer delays only itself, and
a request that stops asking delays no other.

A prefill also runs decoding steps for waiting requests, between its layers and within long ones
(`model/rows.py`). So a long prompt delays a waiting request by a part of a layer, or by one step.

Each request chooses its tokens itself. An error in that fails this request alone.
"""

import itertools
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch

from ragkv.model import Adapter, PromptKV, Recording
from ragkv.model.cpu.copied import FEW_ROWS
from ragkv.model.decode.batching import DecodeRow, decode_rows, rows_are_alike
from ragkv.runtime import Closing, FairLock, Wait, openmp

log = logging.getLogger(__name__)

# The thread that runs a step first waits for the requests of the last step, which will ask again:
# at most this share of that step's time. Without the wait the first request steps alone and the
# others together, so the mean batch is half as large.
PATIENCE = 0.125
# A step has this number of rows of any tenant. Behind them come rows of the tenant whose turn it
# is.
SHARED_ROWS = 4
# The most rows of a step with drafts. A model in 16 bits on a CPU has at most `FEW_ROWS`: with more
# rows it reads other copies of its weights, so the numbers would differ.
DRAFT_ROWS = 16


class DecodeSlot(Closing):
    """One request's place in the batch; close it when the answer is complete."""

    def __init__(
        self, batch: "DecodeBatch", kv: PromptKV, record: Recording | None, tenant: str
    ) -> None:
        self.tenant = tenant
        self._batch = batch
        self._kv = kv
        self._record = record
        self.taken = True
        self.step_s = 0.0  # how long the step took that served this slot last

    def verify(
        self, token: int, drafts: Sequence[int] = (), meanwhile: Sequence[Callable[[], None]] = ()
    ) -> torch.Tensor:
        """The logits (1 + drafts, V) float32 after `token` and after each draft. Waits until a step
        ran.

        Their KV is appended (and recorded); with drafts, `keep` must follow. `meanwhile` are called
        once other requests may run the step; they raise nothing.
        """
        row = DecodeRow(self._kv, token, self._record, tuple(drafts))
        return self._batch.logits_after(_TokenRequest(self, row), meanwhile)

    def keep(self, drafted: int, accepted: int) -> None:
        """Of the last step's drafts, which were `drafted`, only the first `accepted` are part of
        the answer.
        """
        self._kv.length -= drafted - accepted
        if self._record is not None:
            self._record.filled_to = min(self._record.filled_to, self._kv.length)

    @property
    def room(self) -> int:
        """How many drafts a step may have now: none for a KV that takes none, nor while many others
        decode.
        """
        most_rows = self._batch.most_rows or 1
        rows = min(self._kv.capacity - self._kv.length, most_rows // self._batch.slots)
        return max(0, rows - 1) if self._kv.takes_drafts else 0

    def close(self) -> None:
        """Leave the batch: no step waits for this request any more."""
        self._batch._leave(self)


class _TokenRequest:
    """A request for the logits after one token and after its drafts."""

    def __init__(self, slot: DecodeSlot, row: DecodeRow) -> None:
        self.slot = slot
        self.row = row
        self.length = row.kv.length
        self.wait = Wait(slot.tenant)
        self.logits: torch.Tensor | None = None  # (1 + drafts, V)
        self.error: Exception | None = None

    @property
    def done(self) -> bool:
        return self.logits is not None or self.error is not None


@dataclass(eq=False)
class DecodeBatch:
    """Decodes for many requests on one model."""

    adapter: Adapter
    lock: FairLock  # held by the thread that computes
    # requests that wait for a token
    waiting: list[_TokenRequest] = field(default_factory=list, init=False)
    slots: int = field(default=0, init=False)  # in use
    # rows of a step with drafts, of all its slots; None: before the first step, which tries it
    most_rows: int | None = field(default=None, init=False)
    step_s: float = field(default=0.0, init=False)  # how long the last step took
    _stepped_at: float = field(default=0.0, init=False)  # when it ended
    # the slots that the last step served and that do not wait again yet
    _expected: set[DecodeSlot] = field(default_factory=set, init=False)
    _changed: threading.Condition = field(default_factory=threading.Condition, init=False)

    @property
    def is_due(self) -> bool:
        """Whether `step_waiting` runs a step now."""
        return bool(self.waiting) and time.perf_counter() - self._stepped_at >= self.step_s

    def slot(self, kv: PromptKV, record: Recording | None = None, tenant: str = "") -> DecodeSlot:
        """A slot for the prompt of `kv`, which has space for its answer.

        `record` receives the decoded KV; `tenant` is charged for the steps.
        """
        with self._changed:
            self.slots += 1
        return DecodeSlot(self, kv, record, tenant)

    def step_waiting(self) -> None:
        """Run one step for all waiting requests. A thread that holds the compute lock calls this
        between two layers.

        Steps take at most half of the time: after one, the caller computes at least as long. Errors
        of the step are raised in the requests, not here.
        """
        if self.is_due:
            self._step()

    def logits_after(
        self, request: _TokenRequest, meanwhile: Sequence[Callable[[], None]]
    ) -> torch.Tensor:
        """The logits of a request for one token. Waits until a step ran."""
        try:
            with self._changed:
                self.waiting.append(request)
                self._expected.discard(request.slot)
                self._changed.notify_all()
            for work in meanwhile:
                work()
            self._wait_for(request)
        except BaseException:  # interrupted: this token is not wanted any more
            with self._changed:
                self.waiting = [other for other in self.waiting if other is not request]
            raise
        if request.error is not None:
            raise request.error
        assert request.logits is not None
        return request.logits

    def _wait_for(self, request: _TokenRequest) -> None:
        """Return when the request is done: another thread's step serves it, or this
        thread's own.
        """
        if self.lock.acquire(request.wait):
            try:
                # latecomers of the last step are skipped, until they are served again
                with self._changed:
                    self._changed.wait_for(lambda: not self._expected, self.step_s * PATIENCE)
                while not request.done:  # a step may serve other tenants' requests first
                    self._step()
            finally:
                self.lock.release(coming_back=self.slots == 1)

    def _leave(self, slot: DecodeSlot) -> None:
        with self._changed:
            self.slots -= slot.taken
            slot.taken = False
            self._expected.discard(slot)
            self._changed.notify_all()
        openmp.release_threads()

    def _step(self) -> None:
        """One step for all waiting requests. The caller holds the compute lock."""
        if self.most_rows is None:
            self.most_rows = self.rows_alike()
        with self._changed:
            requests = self._next_requests()
            self.waiting = [request for request in self.waiting if request not in requests]
        if not requests:
            return
        began = time.perf_counter()
        try:
            # The lock is kept for the whole step, because its requests wait nowhere else.
            self._serve(requests)
        # if interrupted: requests that were not served still wait for the lock, and then step
        # themselves
        finally:
            served = [request for request in requests if request.done]
            with self._changed:
                self.waiting = [request for request in requests if not request.done] + self.waiting
                self._expected = {request.slot for request in served if request.error is None}
            self._stepped_at = time.perf_counter()
            self.step_s = self._stepped_at - began
            for request in served:
                request.slot.step_s = self.step_s
            self.lock.share([request.wait.tenant for request in requests], self.step_s)
            self.lock.dismiss(request.wait for request in served)

    def rows_alike(self) -> int:
        """How many rows a step with drafts may have here; 1: there are no drafts."""
        adapter = self.adapter
        on_cpu = adapter.device.type == "cpu"
        rows = FEW_ROWS if adapter.dtype.itemsize < 4 and on_cpu else DRAFT_ROWS
        if adapter.rope.depends_on_length or (on_cpu and not rows_are_alike(adapter, rows)):
            log.info(
                "No drafts: rows that are computed together would get other numbers than alone."
            )
            return 1
        return rows

    def _next_requests(self) -> list[_TokenRequest]:
        """The requests of the next step, the oldest first; of several tenants in turns. The
        caller holds `_changed`.
        """
        seen: Counter[str] = Counter()
        # the number of its tenant's requests that are older
        ranked: list[tuple[int, _TokenRequest]] = []
        for request in self.waiting:
            ranked.append((seen[request.wait.tenant], request))
            seen[request.wait.tenant] += 1
        # With several tenants a step has few rows, and at least one of each, so no tenant pays for
        # many rows of another. A tenant also counts while it waits to prefill, prefills between two
        # steps, or is about to ask for its next token.
        if len(self.lock.tenants.union(seen, (slot.tenant for slot in self._expected))) > 1:
            ranked.sort(key=lambda one: one[0])
            ranked = [one for rank, one in enumerate(ranked) if rank < SHARED_ROWS or one[0] == 0]
        requests = [request for _, request in ranked]
        # More requests may have come since there was room for their drafts.
        if any(request.row.drafts for request in requests):
            ends = itertools.accumulate(len(request.row.tokens) for request in requests)
            requests = [
                request
                for request, end in zip(requests, ends, strict=True)
                if end <= (self.most_rows or 1)
            ]
        return requests

    def _serve(self, requests: list[_TokenRequest]) -> None:
        """Give every request its logits or its error. If a step for all fails, each request is
        tried alone.
        """
        try:
            rows = decode_rows(self.adapter, [request.row for request in requests])  # (B, V)
            together: Iterable[torch.Tensor] = torch.split(
                rows, [len(request.row.tokens) for request in requests]
            )
            # Without copies a slow consumer would keep the logits of the whole step in memory.
            if len(requests) > 1:
                together = [logits.clone() for logits in together]
            # other threads read these logits, perhaps on another stream
            self.adapter.wait_for_device()
            for request, logits in zip(requests, together, strict=True):
                request.logits = logits
        except BaseException as error:
            left = [request for request in requests if not request.done]
            for request in left:
                request.row.kv.length = request.length
            if not isinstance(error, Exception):
                raise
            if len(requests) == 1:
                requests[0].error = error
                return
            for request in left:
                self._serve([request])
