"""Decides for every run of a prompt whether it is exact, fused or computed, and why.

Nothing is looked up, opened or changed here. `wanted_spans` says which state each run should have
at its place in the prompt. `lookup.py` adds leases to the spans that are stored. `plan_of` makes
the plan of both. Two modules decide which spans are exact: this one, and `prefix_blocks.py` for
blocks of earlier prompts.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace

import torch

from ragkv.control import Method, Why
from ragkv.fusion import Plan, Span, SpanKind, SpanState
from ragkv.prompt.history import Block, exact_blocks
from ragkv.store.entry import ids_digest
from ragkv.store.tiers import Lease
from ragkv.types import Excerpt

from .prefix_blocks import reusing
from .prompt import Prompt

# The first tokens of the prompt's first chunk are computed in place. There they are the prompt's
# attention sinks, and the stored KV has seen others (docs/research/selection.md).
LEADING_TOKENS = 64


def wanted_spans(prompt: Prompt, method: Method, rope_digest: str) -> list[Span]:
    """The runs of a prompt in order, in the states that they should have: what is not computed is
    to be looked up. `rope_digest` is that of the prompt's RoPE frequencies.
    """
    spans = list(_wanted_past(prompt, method, rope_digest))
    for ids, chunk in prompt.body:
        start = spans[-1].stop if spans else 0
        stop = start + len(ids)
        if chunk is None:
            spans.append(Span(SpanKind.TEMPLATE, start, stop, SpanState.COMPUTED))
        elif method.reuse != "fused":
            why = Why.FULL_RECOMPUTE if method.reuse == "none" else Why.ONLY_EXACT
            computed = SpanState.COMPUTED
            spans.append(Span(SpanKind.CHUNK, start, stop, computed, chunk=chunk, why=why))
        else:
            # at the prompt's beginning, or right after the prefix with which entries are encoded
            leads = (
                start == prompt.body_start
                and not prompt.past_ids
                and (prompt.own_prefix or not start)
            )
            state = SpanState.EXACT if leads else SpanState.FUSED
            whole = prompt.chunks[chunk]
            offset = whole.offset if isinstance(whole, Excerpt) else 0
            spans.append(Span(SpanKind.CHUNK, start, stop, state, chunk=chunk, offset=offset))
    if prompt.tail:
        length = len(prompt.token_ids)
        start = length - len(prompt.tail)
        spans.append(Span(SpanKind.QUESTION, start, length, SpanState.COMPUTED))
    return spans


def _wanted_past(prompt: Prompt, method: Method, rope_digest: str) -> Iterator[Span]:
    """The prefix, the history's blocks, and its tail, which has no stored KV."""
    at = len(prompt.prefix)
    is_wanted = method.reuse != "none" and prompt.own_prefix
    if at:
        yield Span(SpanKind.PREFIX, 0, at, SpanState.EXACT if is_wanted else SpanState.COMPUTED)
    if prompt.history is None:
        return
    blocks = prompt.history.blocks
    prefix_digest = ids_digest(prompt.prefix)
    exact = exact_blocks(prompt.prefix, blocks, rope_digest)
    for index, (block, is_exact) in enumerate(zip(blocks, exact, strict=True)):
        why = None
        state = SpanState.EXACT if is_exact else _inexact_state(block, method)
        if method.reuse == "none":
            why = Why.FULL_RECOMPUTE
        elif block.prefix_digest != prefix_digest:
            why = Why.OTHER_PREFIX
        elif block.rope_digest != rope_digest:
            why = Why.OTHER_FREQUENCIES
        elif state is SpanState.COMPUTED:
            why = Why.WAS_INEXACT
        state = state if why is None else SpanState.COMPUTED
        stop = at + len(block)
        offset = block.start
        yield Span(SpanKind.HISTORY, at, stop, state, block=index, offset=offset, why=why)
        at = stop
    if tail := prompt.history.tail:
        yield Span(SpanKind.HISTORY, at, at + len(tail), SpanState.COMPUTED)


def _inexact_state(block: Block, method: Method) -> SpanState:
    """How a block is used that is not exact.

    Only a turn that fused chunks leaves tokens to choose from. Truncation, a codec that rounds, an
    answer decoded with KCache and what saw any of these are used as they are.
    """
    if method.history_treatment == "recompute":
        return SpanState.COMPUTED
    is_choice = method.history_treatment == "select" and block.fused
    return SpanState.FUSED if is_choice else SpanState.APPROXIMATE


def plan_of(
    prompt: Prompt,
    method: Method,
    looked_up: Sequence[Span],
    rope_digest: str,
    *,
    damaged: AbstractSet[int] = frozenset(),
    earlier: Sequence[Lease] = (),
    away: Sequence[str] = (),
) -> Plan:
    """The plan of a prompt. `looked_up` are its wanted runs, each with its lease if it is stored.

    The entries of the chunks `damaged` were found damaged by this request. `earlier` are exact
    blocks of earlier prompts, from the history's end on. `away` are kinds of storage that do not
    answer.
    """
    lost = {
        span.block: span.why or Why.LOST
        for span in looked_up
        if span.block is not None and span.lease is None and method.reuse != "none"
    }
    missed = tuple(span.chunk for span in looked_up if span.chunk is not None and span.is_missed)
    spans = list[Span]()
    for span in looked_up:
        if span.kind is SpanKind.HISTORY:
            spans.append(_history(span, prompt, method))
        elif span.state is SpanState.COMPUTED or span.kind is SpanKind.PREFIX:
            is_missing = span.lease is None
            spans.append(replace(span, state=SpanState.COMPUTED) if is_missing else span)
        elif span.lease is None:
            why = Why.DAMAGED if span.chunk in damaged else Why.MISSED
            spans.append(replace(span, state=SpanState.COMPUTED, offset=0, why=why))
        else:
            spans += _stored_chunk(span, span.lease, rope_digest, prompt.own_prefix)
    if earlier:
        spans = reusing(spans, earlier, prompt.body_start)
    notes = (*_lost_notes(prompt, lost), *_away_notes(method, away, missed))
    return Plan.of(torch.tensor(prompt.token_ids), spans, missed, tuple(lost), notes)


def _history(span: Span, prompt: Prompt, method: Method) -> Span:
    """What becomes of a block, or of the tail, which has none. What was stored with loss is not
    exact.
    """
    state = span.state
    if span.block is None or span.lease is None:
        state = SpanState.COMPUTED
    elif state is SpanState.EXACT and not span.lease.info.lossless:
        state = _inexact_state(prompt.blocks[span.block], method)
    if state is SpanState.COMPUTED:
        return Span(SpanKind.HISTORY, span.start, span.stop, state)
    return replace(span, state=state)


def _stored_chunk(span: Span, lease: Lease, rope_digest: str, own_prefix: bool) -> Iterator[Span]:
    """The spans of a chunk whose entry was found. Its wanted state is exact if it leads."""
    info = lease.info
    fused = replace(span, state=SpanState.FUSED)
    computed = replace(span, state=SpanState.COMPUTED, lease=None, offset=0, why=Why.LEADING)
    if span.state is SpanState.FUSED:
        yield span
    elif not info.is_expected:  # encoded directly after the application's prefix
        # an excerpt that begins later saw tokens of its chunk that are not in the prompt
        is_same = own_prefix and not span.offset and info.rope_digest == rope_digest
        is_exact = info.lossless and is_same
        yield span if is_exact else fused
    elif len(span) <= LEADING_TOKENS:
        yield computed
    else:
        cut = span.start + LEADING_TOKENS
        yield replace(computed, stop=cut)
        yield replace(fused, start=cut, offset=span.offset + LEADING_TOKENS)


def _lost_notes(prompt: Prompt, lost: Mapping[int, str]) -> Iterator[str]:
    """Notes that say why history is computed."""
    tokens = Counter[str]()
    for index, why in lost.items():
        tokens[why] += len(prompt.blocks[index])
    yield from (f"{count} history tokens recomputed: {why}" for why, count in tokens.items())


def _away_notes(method: Method, away: Sequence[str], missed: Sequence[int]) -> Iterator[str]:
    """Notes that name the storage that did not answer, and what that cost."""
    if method.reuse == "none":
        return
    without = (
        f"{len(missed)} chunks that are not stored here were computed"
        if missed
        else "no chunk was missing here"
    )
    yield from (f"{kind} does not answer: {without}" for kind in away)
