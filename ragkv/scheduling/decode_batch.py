"""The batch: requests that want a token decode together. No thread of its own: one of those who wait does the work.

A request takes a slot and asks for the logits behind one token after the other. Whoever gets the model first runs one
step for all who wait at that moment; the others are handed theirs. So rows join and leave at any step, a slow consumer
holds back only itself, and who never asks again is in nobody's way. Between two layers of a prefill its thread steps
those who wait, too: a long prompt delays them by a layer, or by as long as a step takes.

It knows no samplers and no text: what a token is chosen by is its consumer's, and fails its consumer alone.
"""

import threading
import time
from types import TracebackType
from typing import Self

import torch

from ragkv.model import Adapter, PromptKV, Recording
from ragkv.model.batching import DecodeRow, decode_rows
from ragkv.runtime import openmp

from .compute_lock import ComputeLock, Waiter

# A leader waits so much of the last step's time for those who were served in it and are about to ask again. Without,
# who is first steps alone, and the rest together: half the batch in the mean (see docs/log.md).
PATIENCE = 0.125


class DecodeSlot:
    """One request's place; leave it when the answer is over."""

    def __init__(self, batch: "DecodeBatch", kv: PromptKV, record: Recording | None) -> None:
        self._batch, self._kv, self._record = batch, kv, record
        self.taken = True

    def step(self, token: int) -> torch.Tensor:
        """The logits (V,) float32 after `token`, whose KV is appended (and recorded). Waits for its turn."""
        return self._batch._ask(_Ask(self, DecodeRow(self._kv, token, self._record)))

    def leave(self) -> None:
        """Nobody need wait for this one. Twice is harmless."""
        self._batch._leave(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.leave()


class _Ask:
    """One token wanted."""

    def __init__(self, slot: DecodeSlot, row: DecodeRow) -> None:
        self.slot, self.row = slot, row
        self.length = row.kv.length
        self.waiter = Waiter()
        self.logits: torch.Tensor | None = None  # (V,)
        self.error: Exception | None = None

    @property
    def done(self) -> bool:
        """Whether there is an answer, be it an error."""
        return self.logits is not None or self.error is not None


class DecodeBatch:
    """Decodes for many requests on one model."""

    def __init__(
        self, adapter: Adapter, compute: ComputeLock, patience: float = PATIENCE, rows: int | None = None
    ) -> None:
        """`patience` is the share of a step's time that a leader waits for latecomers, at most; `rows` the most a step
        decodes for, `None` all who wait: at 1 they decode one by one.
        """
        self._adapter, self._compute, self._patience, self._rows = adapter, compute, patience, rows
        self._changed = threading.Condition()
        self._waiting: list[_Ask] = []
        self._due: set[DecodeSlot] = set()  # served by the last step, and not back yet
        self._slots = 0  # seats taken and not left
        self._step_s = 0.0  # how long the last step took
        self._stepped_at = 0.0  # when it ended

    def slot(self, kv: PromptKV, record: Recording | None = None) -> DecodeSlot:
        """A place for the prompt of `kv`, which has room for its answer; `record` is given what is decoded."""
        with self._changed:
            self._slots += 1
        return DecodeSlot(self, kv, record)

    def step_waiting(self) -> None:
        """Run one step for all who wait, if any; for who has the model and is between two layers of something longer.

        Steps take half the time at most: after one, the caller has at least as long for itself. Raises nothing of the
        step's.
        """
        if self._waiting and time.perf_counter() - self._stepped_at >= self._step_s:  # without a lock: mostly nobody
            self._step()

    def _ask(self, ask: _Ask) -> torch.Tensor:
        try:
            with self._changed:
                self._waiting.append(ask)
                self._due.discard(ask.slot)
                self._changed.notify_all()
            if self._compute.acquire(ask.waiter):
                try:
                    if self._rows != 1:
                        self._gather()
                    while not ask.done:  # where a step is full, others may be served first
                        self._step()
                finally:
                    self._compute.release(keep_team=self._slots == 1)
        except BaseException:  # interrupted: nobody need decode this one
            with self._changed:
                self._waiting = [other for other in self._waiting if other is not ask]
            raise
        if ask.error is not None:
            raise ask.error
        assert ask.logits is not None
        return ask.logits

    def _leave(self, slot: DecodeSlot) -> None:
        with self._changed:
            self._slots -= slot.taken
            slot.taken = False
            self._due.discard(slot)
            self._changed.notify_all()
        openmp.release_threads()

    def _gather(self) -> None:
        """Wait a little for those who are about to ask; who is late is not waited for again until served again."""
        with self._changed:
            if self._due:
                self._changed.wait_for(lambda: not self._due, self._step_s * self._patience)

    def _step(self) -> None:
        """One step for all who wait. The caller has the model."""
        with self._changed:
            rows = len(self._waiting) if self._rows is None else self._rows
            asks, self._waiting = self._waiting[:rows], self._waiting[rows:]
        if not asks:
            return
        began = time.perf_counter()
        try:
            self._serve(asks)
        finally:  # if interrupted, those who were not served still stand in line for the model, and step themselves
            served = [ask for ask in asks if ask.done]
            with self._changed:
                self._waiting = [ask for ask in asks if not ask.done] + self._waiting
                self._due = {ask.slot for ask in served if ask.error is None}
            self._stepped_at = time.perf_counter()
            self._step_s = self._stepped_at - began
            self._compute.excuse(ask.waiter for ask in served)

    def _serve(self, asks: list[_Ask]) -> None:
        """Give every one of `asks` its logits or its error: where a step for all fails, each is tried alone."""
        try:
            together = decode_rows(self._adapter, [ask.row for ask in asks])  # (B, V)
            for ask, logits in zip(asks, together, strict=True):
                ask.logits = logits.clone() if len(asks) > 1 else logits  # who is slow keeps nobody else's
        except BaseException as error:
            left = [ask for ask in asks if not ask.done]
            for ask in left:
                ask.row.kv.length = ask.length
            if not isinstance(error, Exception):
                raise
            if len(asks) == 1:
                asks[0].error = error
                return
            for ask in left:
                self._serve([ask])
