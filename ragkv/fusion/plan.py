"""The plan of a prompt: which tokens are exact, which are fused and which are computed.

A plan is made before anything is loaded and never changes. A span is exact if its stored KV was
made after the same tokens and under the same RoPE frequencies. The question, the template, text
between chunks and chunks without an entry are always computed. So is the last token, because its
logits are needed.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from enum import Enum

import torch

from ragkv.store.tiers import Lease

# A longer question, such as a whole conversation, asks with its last rows only.
MOST_ASKING_ROWS = 64


class SpanKind(Enum):
    """The content of a span."""

    PREFIX = "prefix"
    HISTORY = "history"
    CHUNK = "chunk"
    TEMPLATE = "template"  # between and after chunks, such as a separator: always computed
    QUESTION = "question"


class SpanState(Enum):
    """How the KV of a span is obtained."""

    EXACT = "exact"  # reused, and equal to the KV of a full prefill
    APPROXIMATE = "approximate"  # history that is not exact and is reused as it is
    FUSED = "fused"  # reused, and its tokens are candidates for recompute
    COMPUTED = "computed"


@dataclass(frozen=True, slots=True)
class Span:
    """The prompt positions start ... stop - 1, which share one state."""

    kind: SpanKind
    start: int
    stop: int
    state: SpanState
    lease: Lease | None = None  # its stored KV; None if it is computed
    chunk: int | None = None  # index into the prompt's chunks
    block: int | None = None  # index into the history's blocks
    offset: int = 0  # the first token of the entry that is used
    why: str | None = None  # why a chunk is computed

    @property
    def is_missed(self) -> bool:
        """Whether it is a chunk that should be reused and is not stored."""
        return (
            self.chunk is not None and self.lease is None and self.state is not SpanState.COMPUTED
        )

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Candidates:
    """The N tokens a selector may choose from: fused spans without the prompt's last token."""

    positions: torch.Tensor  # (N,) int64 ascending, absolute in the prompt
    # (N,) position within the span, whose first token need not be the first of its chunk
    offset: torch.Tensor

    @classmethod
    def of(cls, spans: Sequence[Span], last: int) -> "Candidates":
        """Those of a prompt's `spans`; `last` is its last position."""
        fused = [span for span in spans if span.state is SpanState.FUSED]
        counts = [min(span.stop, last) - span.start for span in fused]
        empty = torch.empty(0, dtype=torch.int64)
        return cls(
            torch.cat(
                [empty, *(s.start + torch.arange(n) for s, n in zip(fused, counts, strict=True))]
            ),
            torch.cat([empty, *map(torch.arange, counts)]),
        )

    def __len__(self) -> int:
        return self.positions.numel()


@dataclass(frozen=True, slots=True)
class Plan:
    """The spans of one prompt."""

    token_ids: torch.Tensor  # (S,) int64
    spans: tuple[Span, ...]  # in order, covering 0 ... S - 1
    computed: torch.Tensor  # positions that are computed in every layer, ascending
    candidates: Candidates
    missed: tuple[int, ...] = ()  # indices of chunks that have no usable entry
    # indices of history blocks whose KV was lost: they are computed here and stored again
    lost_blocks: tuple[int, ...] = ()
    notes: tuple[str, ...] = ()  # sentences for the report

    @classmethod
    def of(
        cls,
        token_ids: torch.Tensor,
        spans: Sequence[Span],
        missed: tuple[int, ...] = (),
        lost_blocks: tuple[int, ...] = (),
        notes: tuple[str, ...] = (),
    ) -> "Plan":
        """The plan of `token_ids` (S,) with the given spans."""
        last = token_ids.numel() - 1
        is_computed = torch.zeros(last + 1, dtype=torch.bool)
        is_computed[last] = True
        for span in spans:
            if span.state is SpanState.COMPUTED:
                is_computed[span.start : span.stop] = True
        computed = is_computed.nonzero().squeeze(1)
        candidates = Candidates.of(spans, last)
        return cls(token_ids, tuple(spans), computed, candidates, missed, lost_blocks, notes)

    def computing(self, spans: Collection[Span], why: str) -> "Plan":
        """The same with these spans computed instead of loaded."""
        if not spans:
            return self
        changed = [
            replace(span, state=SpanState.COMPUTED, lease=None, offset=0, why=why)
            if span in spans
            else span
            for span in self.spans
        ]
        return Plan.of(self.token_ids, changed, self.missed, self.lost_blocks, self.notes)

    @property
    def loaded(self) -> tuple[Span, ...]:
        """The spans that are read from leases."""
        return tuple(span for span in self.spans if span.lease is not None)

    @property
    def question_rows(self) -> int:
        """The number of rows after all others: the question and the template's tail."""
        length = self.token_ids.numel()
        count = self.computed.numel()
        return int((self.computed == torch.arange(length - count, length)).sum())

    @property
    def unasked_rows(self) -> int:
        """The number of the question's first rows that are left out when it asks."""
        return max(0, self.question_rows - MOST_ASKING_ROWS)

    def asking(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Token ids and computed positions of the pass in which the question asks.

        Of a long question only the last rows ask, at the positions where the question begins.
        """
        start = self.token_ids.numel() - self.question_rows
        left_out = self.unasked_rows
        ids = torch.cat((self.token_ids[:start], self.token_ids[start + left_out :]))
        return ids, self.computed[: self.computed.numel() - left_out]

    @property
    def leading_rows(self) -> int:
        """The number of computed rows before the first candidate: no pass changes what they see."""
        return int(torch.searchsorted(self.computed, self.candidates.positions[:1]).sum())
