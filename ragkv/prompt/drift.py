"""Notices when fused prompts drift away from full recompute: a share of the requests is computed again in idle time.

The gate measures on prompts that it makes; live questions and documents change. A sample is held as token ids and the
most probable first tokens, never as KV, and only until it is checked: there are a few at most, and everything that is
deleted deletes them too. While requests run nothing is checked, and a check ends between two layers when one comes.
"""

import logging
import math
import random
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from ragkv.errors import CancelledError
from ragkv.fusion import make_selector
from ragkv.fusion.gate_result import SURE, Tolerance
from ragkv.prompt.history import EMPTY
from ragkv.runtime import openmp
from ragkv.scheduling import Activity, IdleTicket

from .prefill import Prefiller
from .request import ActiveRequest, Prefill, PrefillMethod, Prompt, Request

log = logging.getLogger(__name__)

PENDING = 4  # samples that wait at most
WINDOW = 256  # checks that count
TOP = 64  # first tokens that are held of a sample
ATTEMPTS = 3  # checks of a sample that requests may end, before it is dropped
WAIT_S = 60.0  # a sample is dropped if no idle time comes for so long
DOUBT = 0.01  # the agreement is below its bound with 99 % certainty: it is looked at again and again
FULLY = PrefillMethod(0.0, make_selector("none"), "none")


@dataclass(frozen=True, slots=True)
class DriftStats:
    """What checks of live requests found, over the last `WINDOW`."""

    checked: int  # requests, since the start
    dropped: int  # samples that were never checked: there was no idle time, or what they held was deleted
    counted: int  # checks in the window of which full recompute was sure
    agreement: float | None  # share of these with the same first token; None: none yet
    agreement_at_most: float | None  # its upper 99 % bound
    kl: float | None  # mean over the window, nats: full recompute against fused, over the likeliest first tokens
    tolerance: float  # the gate's: the agreement should not be below it
    drifted: bool  # even the bound is below it


@dataclass(frozen=True, slots=True)
class _Sample:
    token_ids: tuple[int, ...]
    tokens: torch.Tensor  # (K,) the likeliest first tokens under fusion
    log_probs: torch.Tensor  # (K,) float32
    attempts: int = 0  # checks that a request ended


@dataclass(frozen=True, slots=True)
class _Check:
    agrees: bool | None  # None: full recompute is not sure
    kl: float


class DriftWatch:
    """Samples fused requests of one engine and checks them. Thread-safe; without a share it does nothing."""

    def __init__(
        self, prefiller: Prefiller, activity: Activity, sampled_share: float, tolerance: Callable[[], Tolerance]
    ) -> None:
        """`tolerance` is that of the gate result in use."""
        self._prefiller, self._activity = prefiller, activity
        self._share, self._tolerance = sampled_share, tolerance
        self._random = random.Random(0)
        self._waiting: deque[_Sample] = deque()
        self._checks: deque[_Check] = deque(maxlen=WINDOW)
        self._checked = self._dropped = 0
        self._generation = 0  # grows when samples are dropped, so that a check under way ends
        self._working = self._closing = self._said = False
        self._flushing = 0  # calls of `flush` under way; meanwhile no request stops the work
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def offer(self, active: ActiveRequest, prefill: Prefill) -> None:
        """Sample a prefilled request, perhaps. One that named its ratio or selector says nothing about the gate's."""
        if not self._share or active.request.method.named or not prefill.reuse.fused:
            return
        with self._changed:
            if self._closing or self._random.random() >= self._share:
                return
            if len(self._waiting) >= PENDING:
                self._dropped += 1
                return
            best = prefill.logits.log_softmax(-1).topk(min(TOP, prefill.logits.numel()))
            self._waiting.append(_Sample(active.prompt.token_ids, best.indices.cpu(), best.values.cpu()))
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="ragkv-drift", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def forget(self) -> None:
        """Drop all samples, also the one under check: something was deleted that they may hold."""
        with self._changed:
            self._drop_all()

    def restart(self) -> None:
        """Drop all samples and checks: from now on requests are fused in another way."""
        with self._changed:
            self._drop_all()
            self._checks.clear()
            self._said = False

    def stats(self) -> DriftStats | None:
        """What was found; `None` if no request is sampled."""
        if not self._share:
            return None
        with self._changed:
            return self._stats()

    def flush(self) -> None:
        """Return when no sample waits. Does not wait for requests to end."""
        if self._thread is None:
            return
        openmp.release_threads()
        with self._changed:
            self._flushing += 1
            self._activity.wake()
            self._changed.wait_for(lambda: self._closing or not (self._waiting or self._working))
            self._flushing -= 1

    def close(self) -> None:
        """Give up the check under way, and what waits. Twice is harmless."""
        with self._changed:
            self._closing = True
            self._drop_all()
        self._activity.wake()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def _drop_all(self) -> None:
        """Needs `_changed`."""
        self._generation += 1
        self._dropped += len(self._waiting)
        self._waiting.clear()
        self._changed.notify_all()

    def _work(self) -> None:
        while self._wait():
            self._activity.wait_idle(WAIT_S, lambda: self._closing or self._flushing > 0)
            with self._changed:
                if not self._waiting:
                    continue
                if self._busy():
                    self._drop_all()
                    continue
                self._working, sample, generation = True, self._waiting.popleft(), self._generation
            check = self._check(sample, generation)
            openmp.release_threads()
            with self._changed:
                self._record(sample, check, generation)
            del sample  # otherwise it would live until the next one comes

    def _wait(self) -> bool:
        """Wait for a sample; `False` when this is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closing)
            return not self._closing

    def _busy(self) -> bool:
        return self._activity.lock.requests > 0 and not self._flushing

    def _check(self, sample: _Sample, generation: int) -> _Check | None:
        """Full recompute of the sample's prompt against it; `None` if a request came, or it was dropped."""
        ticket = IdleTicket(lambda: self._closing or self._generation != generation or self._busy())
        prompt = Prompt((), EMPTY, (), sample.token_ids, own_prefix=False)
        try:
            active = ActiveRequest(Request((), (), FULLY), prompt, ticket, keep=False)
            full = self._prefiller.prefill(active).logits.log_softmax(-1).cpu()
        except CancelledError:
            return None
        except Exception:
            if not self._closing:
                log.exception("A prompt of %d tokens could not be checked for drift.", len(sample.token_ids))
            return None
        return compare(full, sample.tokens, sample.log_probs)

    def _record(self, sample: _Sample, check: _Check | None, generation: int) -> None:
        """Needs `_changed`."""
        self._working = False
        if generation != self._generation:
            self._dropped += 1
        elif check is None:
            if sample.attempts + 1 < ATTEMPTS and len(self._waiting) < PENDING:
                self._waiting.appendleft(replace(sample, attempts=sample.attempts + 1))
            else:
                self._dropped += 1
        else:
            self._checked += 1
            self._checks.append(check)
            found = self._stats()
            if found.drifted and not self._said:
                self._said = True
                log.warning(
                    "Answers drift: in %d checks of live requests the first token agrees with full recompute in %.3f "
                    "(at most %.3f), and the gate tolerates %.3f. Run `ragkv gate --apply` on these documents.",
                    *(found.counted, found.agreement, found.agreement_at_most, found.tolerance),
                )
        self._changed.notify_all()

    def _stats(self) -> DriftStats:
        """Needs `_changed`."""
        tolerance = self._tolerance().agreement
        sure = [check.agrees for check in self._checks if check.agrees is not None]
        most = agreement_at_most(sum(sure), len(sure)) if sure else None
        return DriftStats(
            checked=self._checked,
            dropped=self._dropped,
            counted=len(sure),
            agreement=sum(sure) / len(sure) if sure else None,
            agreement_at_most=most,
            kl=math.fsum(check.kl for check in self._checks) / len(self._checks) if self._checks else None,
            tolerance=tolerance,
            drifted=most is not None and most < tolerance,
        )


def compare(full: torch.Tensor, tokens: torch.Tensor, log_probs: torch.Tensor) -> _Check:
    """Full recompute's log-probabilities (V,) against the likeliest tokens (K,) of a fused prompt and theirs (K,).

    All other tokens count as one, so the KL is at most that of the whole distributions.
    """
    best = full.topk(2)
    sure = bool(best.values[0] - best.values[1] >= SURE)
    kept = full[tokens]
    kl = (kept.exp() * (kept - log_probs)).sum()
    rest, found = (1.0 - kept.exp().sum()).clamp_min(0.0), (1.0 - log_probs.exp().sum()).clamp_min(1e-9)
    kl = kl + (rest * (rest / found).log() if rest > 0 else 0.0)
    return _Check(bool(best.indices[0] == tokens[0]) if sure else None, max(0.0, float(kl)))


def agreement_at_most(agreed: int, count: int) -> float:
    """The largest share with which `agreed` or fewer of `count` checks would agree with probability `DOUBT`."""
    if agreed == count:
        return 1.0
    low, high = 0.0, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        tail = math.fsum(
            math.comb(count, number) * middle**number * (1.0 - middle) ** (count - number)
            for number in range(agreed + 1)
        )
        low, high = (middle, high) if tail > DOUBT else (low, middle)
    return high


__all__ = ["DriftStats", "DriftWatch", "agreement_at_most"]
