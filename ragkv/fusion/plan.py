"""What is to happen to every token of a prompt: reused exactly, fused, or computed.

A plan is made before anything is loaded and does not change while it is carried out. Exact are the prefix and, where
their RoPE frequencies are the prompt's, spans that saw just what precedes them here (a chunk right behind the prefix).
The question, the template, chunks without an entry and the last token, whose logits are wanted, are always computed.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import torch

from ragkv.store import Lease


class SpanKind(Enum):
    """What a run of the prompt is."""

    PREFIX = "prefix"
    HISTORY = "history"
    CHUNK = "chunk"
    QUESTION = "question"


class SpanState(Enum):
    """What becomes of it."""

    EXACT = "exact"  # reused, and equal to what a full prefill computes
    APPROXIMATE = "approximate"  # history reused as it was made, never recomputed: a fused or a truncated turn left it
    FUSED = "fused"  # reused, and its tokens are candidates for recompute
    COMPUTED = "computed"


@dataclass(frozen=True, slots=True)
class Span:
    """A run of prompt positions start ... stop - 1 with one fate."""

    kind: SpanKind
    start: int
    stop: int
    state: SpanState
    lease: Lease | None = None  # what all but COMPUTED spans are read from
    chunk: int | None = None  # index into the request's chunks
    offset: int = 0  # the token of the entry it begins with
    rotated_from: int | None = None  # the position its first key is rotated to, where that is not `start` (NKVT alone)

    def __len__(self) -> int:
        return self.stop - self.start

    @property
    def rotary_start(self) -> int:
        """The position its first key is rotated to."""
        return self.start if self.rotated_from is None else self.rotated_from


@dataclass(frozen=True, slots=True)
class Candidates:
    """The N tokens a selector may choose from: fused, not exact, not forced."""

    positions: torch.Tensor  # (N,) int64 ascending, absolute in the prompt
    span_index: torch.Tensor  # (N,) which fused span, 0 first
    offset: torch.Tensor  # (N,) place within the span
    sensitivity: torch.Tensor | None  # (N,) float32, or None if some entry has no scores
    topics: torch.Tensor | None = None  # (N, C) float32: what each is about, where a network has said so

    def __len__(self) -> int:
        return self.positions.numel()


@dataclass(frozen=True, slots=True)
class Plan:
    """One prompt's tokens and their fate."""

    token_ids: torch.Tensor  # (S,) int64
    spans: tuple[Span, ...]  # in order, covering 0 ... S - 1
    forced: torch.Tensor  # positions computed in every layer, ascending
    candidates: Candidates

    @classmethod
    def of(cls, token_ids: torch.Tensor, spans: Sequence[Span]) -> "Plan":
        """The plan of `token_ids` (S,) whose spans are decided."""
        last = token_ids.numel() - 1
        computed = torch.zeros(last + 1, dtype=torch.bool)
        computed[last] = True
        for span in spans:
            if span.state is SpanState.COMPUTED:
                computed[span.start : span.stop] = True
        forced = computed.nonzero().squeeze(1)
        return cls(token_ids, tuple(spans), forced, _candidates(spans, last))

    @property
    def reach(self) -> int:
        """Positions that keys are rotated to: S, unless a span turns its keys further."""
        return max(self.token_ids.numel(), *(span.rotary_start + len(span) for span in self.spans))

    def loaded(self) -> tuple[Span, ...]:
        """The spans that are read from leases."""
        return tuple(span for span in self.spans if span.lease is not None)


def _candidates(spans: Sequence[Span], last: int) -> Candidates:
    fused = [span for span in spans if span.state is SpanState.FUSED]
    positions, index, offset, scores = [], [], [], []
    for number, span in enumerate(fused):
        stop = span.stop - 1 if span.stop - 1 == last else span.stop
        here = torch.arange(span.start, stop)
        positions.append(here)
        index.append(torch.full_like(here, number))
        offset.append(here - span.start)
        if span.lease is not None and span.lease.sensitivity is not None:
            scores.append(span.lease.sensitivity[span.offset :][: stop - span.start])
    empty = torch.empty(0, dtype=torch.int64)
    known = torch.cat(scores).float() if fused and len(scores) == len(fused) else None  # (N, 1 + C)
    return Candidates(
        torch.cat(positions) if positions else empty,
        torch.cat(index) if index else empty,
        torch.cat(offset) if offset else empty,
        None if known is None else known[:, 0].contiguous(),
        known[:, 1:] if known is not None and known.shape[1] > 1 else None,
    )
