"""The fate of every run of a prompt, as plain values for reports and the page."""

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch

from ragkv.fusion import Plan, Span, SpanKind, SpanState
from ragkv.types import PromptSpan

from .request import Prompt

SLOWER = "computing is quicker than loading the stored KV"


def prompt_spans(
    plan: Plan, selected: torch.Tensor, prompt: Prompt, unused: Mapping[int, str]
) -> tuple[PromptSpan, ...]:
    """The runs of a prompt, in order. They cover it, and their sums are those of `Reuse`.

    `selected` (C,) are the positions recomputed in the last layer, ascending. `unused` says why chunks were not looked
    up or not found, by their index; the other computed chunks were found, and left to be computed.
    """
    length = plan.token_ids.numel()
    positions = selected.tolist()
    return tuple(
        _explained(piece, span, unused)
        for span in plan.spans
        if len(span)
        for piece in _pieces(span, length, positions, span.chunk in prompt.plain, prompt.question_tokens)
    )


def _pieces(
    span: Span, length: int, selected: Sequence[int], plain: bool, question_tokens: int
) -> Iterator[PromptSpan]:
    """Cut a span into pieces of one kind and one state. The last token of a prompt is always computed."""
    if span.kind is SpanKind.QUESTION:
        cut = min(span.start + question_tokens, span.stop)
        kinds = [("question", span.start, cut), ("template", cut, span.stop)]
    elif span.kind is SpanKind.CHUNK and plain:
        kinds = [("template", span.start, span.stop)]
    else:
        kinds = [(span.kind.value, span.start, span.stop)]
    for kind, start, stop in kinds:
        reused = stop if span.state is SpanState.COMPUTED else min(stop, length - 1)
        chunk = span.chunk if kind == "chunk" else None
        if start < reused:
            among = slice(bisect_left(selected, start), bisect_left(selected, reused))
            here = tuple(at - start for at in selected[among]) if kind in ("chunk", "history") else ()
            yield PromptSpan(kind, start, reused - start, _state(span), here, chunk)
        if reused < stop and start < stop:
            yield PromptSpan(kind, max(start, reused), stop - max(start, reused), "computed", (), chunk)


def _explained(piece: PromptSpan, span: Span, unused: Mapping[int, str]) -> PromptSpan:
    """`piece` of `span`, with the reason if it is a chunk that is not reused."""
    if piece.chunk is None or span.state is not SpanState.COMPUTED:
        return piece
    return replace(piece, why=unused.get(piece.chunk, SLOWER))


def _state(span: Span) -> str:
    return "fused" if span.state is SpanState.APPROXIMATE else span.state.value


__all__ = ["prompt_spans"]
