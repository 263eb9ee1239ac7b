"""The report on an answer's prompt: counts, spans and notes.

Every prompt token is counted once.
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import chain

import torch

from ragkv.fusion import PassResult, Plan, Recompute, Span, SpanKind, SpanState
from ragkv.types import PromptSpan, Reuse

from .prompt import Prompt


def reuse_report(plan: Plan, recompute: Recompute, passed: PassResult, layers: int) -> Reuse:
    """The counts of a prompt that was computed as planned."""
    length = plan.token_ids.numel()
    computed = plan.computed.numel()
    fused = passed.fused
    recomputed = passed.selected_by_layer[-1].numel()
    exact = sum(
        len(span) - (span.stop == length)  # the last token is always computed
        for span in plan.spans
        if span.state is SpanState.EXACT
    )
    repaired = _history_note(plan, passed.selected_by_layer[-1]) if recompute.ratio else None
    joined = (
        f"computed in one pass with {passed.prompts - 1} other prompts"
        if passed.prompts > 1
        else None
    )
    return Reuse(
        exact=exact,
        fused=length - exact - computed - recomputed,
        recomputed=recomputed,
        computed=computed,
        bytes_by_tier=passed.bytes_by_tier,
        missed_chunks=len(plan.missed),
        missed_tokens=sum(len(span) for span in plan.spans if span.chunk in plan.missed),
        ratio=recompute.ratio,
        selector=recompute.selector.name if recompute.ratio else "none",
        compute=fused.row_layers / (layers * length),
        notes=(*plan.notes, *filter(None, (repaired, joined))),
        decision=(*recompute.reasons, *_outcome(recompute, passed)),
    )


def _outcome(recompute: Recompute, passed: PassResult) -> Iterator[str]:
    """How long the prompt took, next to what was expected, in a sentence."""
    if recompute.expected_s is not None and recompute.reasons and passed.prompts == 1:
        took_s = passed.pass_s - passed.others_s
        waited = f", {1e3 * passed.load_s:.3g} ms of it waiting" if passed.load_s else ""
        yield f"expected {1e3 * recompute.expected_s:.3g} ms, took {1e3 * took_s:.3g} ms{waited}"


def prompt_spans(plan: Plan, selected: torch.Tensor, prompt: Prompt) -> tuple[PromptSpan, ...]:
    """The runs of a prompt, in order. They cover it, and their sums are those of `Reuse`.

    `selected` (C,) are the positions recomputed in the last layer, ascending.
    """
    length = plan.token_ids.numel()
    positions = selected.tolist()
    spans = (span for span in plan.spans if len(span))
    pieces = (_pieces(span, length, positions, prompt) for span in spans)
    return tuple(chain.from_iterable(pieces))


def _pieces(
    span: Span, length: int, selected: Sequence[int], prompt: Prompt
) -> Iterator[PromptSpan]:
    """Cut a span into pieces of one kind and one state."""
    if span.kind is SpanKind.QUESTION:
        cut = min(max(span.start, prompt.question_end), span.stop)
        given = min(max(span.start, prompt.given_start), span.stop)
        kinds = [
            ("question", span.start, cut),
            ("template", cut, given),
            ("answer", given, span.stop),
        ]
    else:
        kinds = [(span.kind.value, span.start, span.stop)]
    for kind, start, stop in kinds:
        # the last token is always computed
        reused = stop if span.state is SpanState.COMPUTED else min(stop, length - 1)
        if start < reused:
            among = slice(bisect_left(selected, start), bisect_left(selected, reused))
            here = tuple(at - start for at in selected[among])
            here = here if kind in ("chunk", "history") else ()
            state = "fused" if span.state is SpanState.APPROXIMATE else span.state.value
            yield PromptSpan(kind, start, reused - start, state, here, span.chunk, span.why)
        if reused < stop and start < stop:
            at = max(start, reused)
            yield PromptSpan(kind, at, stop - at, "computed", (), span.chunk)


def _history_note(plan: Plan, selected: torch.Tensor) -> str | None:
    """The share of the candidate history that was recomputed, in a sentence for the report."""
    spans = [
        span
        for span in plan.spans
        if span.kind is SpanKind.HISTORY and span.state is SpanState.FUSED
    ]
    if not spans:
        return None
    count = sum(int(((selected >= span.start) & (selected < span.stop)).sum()) for span in spans)
    return (
        f"{count} of {sum(map(len, spans))} history tokens that are not exact were recomputed for "
        "this question"
    )
