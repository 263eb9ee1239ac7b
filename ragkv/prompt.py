"""From a prompt to a plan: the entries found for its runs, and what each run's fate is.

Leases are opened here and closed by the caller's exit stack. Which spans are exact is decided here and nowhere else.
"""

from collections.abc import Container
from contextlib import ExitStack
from dataclasses import dataclass

import torch

from .config import ReuseMode
from .encoding import Activity, Encoder
from .fusion import Plan, Span, SpanKind, SpanState
from .intake import Prompt
from .model import Adapter
from .store import Lease, Store


@dataclass(frozen=True, slots=True)
class Planned:
    """A plan and what was not found for it."""

    plan: Plan
    missed: tuple[int, ...]  # indices of chunks without a usable entry, of those looked up
    unscored: tuple[int, ...]  # indices of chunks whose entry lacks the sensitivity it is to have


class Planner:
    """Decides every span's fate."""

    def __init__(self, adapter: Adapter, encoder: Encoder, store: Store, activity: Activity) -> None:
        self._adapter, self._encoder, self._store, self._activity = adapter, encoder, store, activity

    def plan(self, prompt: Prompt, reuse: ReuseMode, without: Container[str], leases: ExitStack) -> Planned:
        """The plan of `prompt`, its leases opened on `leases`; keys in `without` are taken as misses.

        Takes its turn at the model if the prefix has to be encoded.
        """
        length, behind_prefix = len(prompt.token_ids), len(prompt.prefix)
        spans = [self._prefix(prompt, reuse, length)] if prompt.prefix else []
        at = behind_prefix + len(prompt.history)
        if prompt.history:
            spans.append(Span(SpanKind.HISTORY, behind_prefix, at, SpanState.COMPUTED))
        missed, unscored = [], []
        frequencies = self._adapter.rope.frequencies(length)
        for index, token_ids in enumerate(prompt.chunks):
            exact = at == behind_prefix and prompt.own_prefix
            wanted = index not in prompt.plain and (reuse == "fused" or (reuse == "prefix" and exact))
            lease = self._lease(token_ids, without, leases) if wanted else None
            if wanted and lease is None:
                missed.append(index)
            elif lease is not None and lease.sensitivity is None and self._encoder.scores:
                unscored.append(index)
            if lease is None:
                state = SpanState.COMPUTED
            elif exact and lease.info.lossless and lease.info.frequencies == frequencies:
                state = SpanState.EXACT  # it saw just what precedes it here
            else:
                state = SpanState.FUSED if reuse == "fused" else SpanState.COMPUTED
            kept = None if state is SpanState.COMPUTED else lease
            spans.append(Span(SpanKind.CHUNK, at, at + len(token_ids), state, kept, index))
            at += len(token_ids)
        if prompt.question:
            spans.append(Span(SpanKind.QUESTION, at, length, SpanState.COMPUTED))
        return Planned(Plan.of(torch.tensor(prompt.token_ids), spans), tuple(missed), tuple(unscored))

    def _prefix(self, prompt: Prompt, reuse: ReuseMode, length: int) -> Span:
        wanted = reuse != "none" and prompt.own_prefix
        lease = self._encoder.prefix(length, self._activity.turn) if wanted else None
        state = SpanState.COMPUTED if lease is None else SpanState.EXACT
        return Span(SpanKind.PREFIX, 0, len(prompt.prefix), state, lease)

    def _lease(self, token_ids: tuple[int, ...], without: Container[str], leases: ExitStack) -> Lease | None:
        if self._encoder.identity.key(token_ids) in without:
            return None
        lease = self._store.lease(self._encoder.identity, token_ids)
        return None if lease is None else leases.enter_context(lease)
