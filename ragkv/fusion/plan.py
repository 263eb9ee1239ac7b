"""The plan of a prompt: which tokens are reused exactly, which are fused and which are computed.

A plan is made before anything is loaded and never changes. Exact are the prefix and every span
whose stored KV was made behind the same tokens and under the same RoPE frequencies, such as a chunk
right behind the prefix. Always computed are the question, the template, text between chunks, chunks
without an entry, and the last token, because its logits are needed.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import torch

from ragkv.store import Lease

# A question of more than `MOST_ASKING_ROWS` rows, such as a conversation sent as one, asks with its
# last ones alone.
MOST_ASKING_ROWS = 64


class SpanKind(Enum):
    """The content of a span."""

    PREFIX = "prefix"
    HISTORY = "history"
    CHUNK = "chunk"
    TEXT = "template"  # between and behind chunks, such as a separator: always computed
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
    chunk: int | None = None  # index into the request's chunks
    offset: int = 0  # the first token of the entry that is used

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Candidates:
    """The N tokens a selector may choose from: those of fused spans, without a forced last
    token.
    """

    positions: torch.Tensor  # (N,) int64 ascending, absolute in the prompt
    offset: torch.Tensor  # (N,) position within the span

    def __len__(self) -> int:
        return self.positions.numel()


@dataclass(frozen=True, slots=True)
class Plan:
    """The spans of one prompt."""

    token_ids: torch.Tensor  # (S,) int64
    spans: tuple[Span, ...]  # in order, covering 0 ... S - 1
    forced: torch.Tensor  # positions computed in every layer, ascending
    candidates: Candidates

    @classmethod
    def of(cls, token_ids: torch.Tensor, spans: Sequence[Span]) -> "Plan":
        """The plan of `token_ids` (S,) with the given spans."""
        last = token_ids.numel() - 1
        computed = torch.zeros(last + 1, dtype=torch.bool)
        computed[last] = True
        for span in spans:
            if span.state is SpanState.COMPUTED:
                computed[span.start : span.stop] = True
        return cls(token_ids, tuple(spans), computed.nonzero().squeeze(1), _candidates(spans, last))

    @property
    def question_rows(self) -> int:
        """How many rows are computed behind all others: the question and the template's tail."""
        length = self.token_ids.numel()
        count = self.forced.numel()
        return int((self.forced == torch.arange(length - count, length)).sum())

    @property
    def unasked_rows(self) -> int:
        """How many of the question's first rows are left out when it asks."""
        return max(0, self.question_rows - MOST_ASKING_ROWS)

    def asking(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Token ids and forced positions of the pass in which the question asks: a long one's end
        in its place.
        """
        start = self.token_ids.numel() - self.question_rows
        left_out = self.unasked_rows
        ids = torch.cat((self.token_ids[:start], self.token_ids[start + left_out :]))
        return ids, self.forced[: self.forced.numel() - left_out]

    @property
    def leading_rows(self) -> int:
        """How many forced rows stand before the first candidate: they see nothing that a pass
        changes later.
        """
        return int(torch.searchsorted(self.forced, self.candidates.positions[:1]).sum())

    def loaded(self) -> tuple[Span, ...]:
        """The spans that are read from leases."""
        return tuple(span for span in self.spans if span.lease is not None)


def _candidates(spans: Sequence[Span], last: int) -> Candidates:
    fused = [span for span in spans if span.state is SpanState.FUSED]
    positions = [torch.arange(span.start, min(span.stop, last)) for span in fused]
    empty = torch.empty(0, dtype=torch.int64)
    offsets = [there - span.start for span, there in zip(fused, positions, strict=True)]
    return Candidates(torch.cat([empty, *positions]), torch.cat([empty, *offsets]))
