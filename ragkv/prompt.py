"""From what is asked to a plan: the prompt's runs, the entries found for them, and what each run's fate is.

Leases are opened here and closed by the caller's exit stack. Which spans are exact is decided here and nowhere else.
"""

from collections.abc import Container
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain

import torch

from .config import ReuseMode
from .encoding import Encoder
from .fusion import Plan, Span, SpanKind, SpanState
from .model import Adapter
from .store import Lease, Store


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt as runs of ids, in order."""

    prefix: tuple[int, ...]
    history: tuple[int, ...]
    chunks: tuple[tuple[int, ...], ...]
    question: tuple[int, ...]  # with the template's tail

    @property
    def token_ids(self) -> tuple[int, ...]:
        """All S ids."""
        return tuple(chain(self.prefix, self.history, *self.chunks, self.question))


@dataclass(frozen=True, slots=True)
class Planned:
    """A plan and what was not found for it."""

    plan: Plan
    missed: tuple[int, ...]  # indices of chunks without a usable entry, of those looked up
    unscored: tuple[int, ...]  # indices of chunks whose entry lacks the sensitivity it is to have


class Planner:
    """Decides every span's fate."""

    def __init__(self, adapter: Adapter, encoder: Encoder, store: Store) -> None:
        self._adapter, self._encoder, self._store = adapter, encoder, store

    def plan(self, prompt: Prompt, reuse: ReuseMode, without: Container[str], leases: ExitStack) -> Planned:
        """The plan of `prompt`, its leases opened on `leases`; keys in `without` are taken as misses.

        The caller holds the compute lock: the prefix may have to be encoded.
        """
        length = len(prompt.token_ids)
        frequencies = self._adapter.rope.frequencies(length)
        spans, missed, unscored, at = [], [], [], 0
        prefix = self._encoder.prefix(length) if reuse != "none" else None
        exact_until = 0  # everything before this position is what a full prefill would have
        if prompt.prefix:
            state = SpanState.COMPUTED if prefix is None else SpanState.EXACT
            spans.append(Span(SpanKind.PREFIX, 0, len(prompt.prefix), state, prefix))
            at = len(prompt.prefix)
        exact_until = at
        if prompt.history:
            spans.append(Span(SpanKind.HISTORY, at, at + len(prompt.history), SpanState.COMPUTED))
            at += len(prompt.history)
        for index, token_ids in enumerate(prompt.chunks):
            wanted = reuse == "fused" or (reuse == "prefix" and at == exact_until)
            lease = self._lease(token_ids, without, leases) if wanted else None
            exact = lease is not None and at == exact_until and lease.info.frequencies == frequencies
            state = SpanState.EXACT if exact else SpanState.COMPUTED
            if reuse == "fused" and lease is not None and not exact:
                state = SpanState.FUSED
            if wanted and lease is None:
                missed.append(index)
            if lease is not None and lease.sensitivity is None and self._encoder.scores:
                unscored.append(index)
            lease = None if state is SpanState.COMPUTED else lease
            spans.append(Span(SpanKind.CHUNK, at, at + len(token_ids), state, lease, index))
            at += len(token_ids)
        if prompt.question:
            spans.append(Span(SpanKind.QUESTION, at, length, SpanState.COMPUTED))
        return Planned(Plan.of(torch.tensor(prompt.token_ids), spans), tuple(missed), tuple(unscored))

    def _lease(self, token_ids: tuple[int, ...], without: Container[str], leases: ExitStack) -> Lease | None:
        if self._encoder.identity.key(token_ids) in without:
            return None
        lease = self._store.lease(self._encoder.identity, token_ids)
        return None if lease is None else leases.enter_context(lease)
