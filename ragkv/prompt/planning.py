"""What becomes of every run of a prompt: exact, fused or computed, and why.

Nothing is looked up, opened or changed here. `wanted` knows from the places in the prompt which
stored KV is of use. `lookup.py` looks that up, and `plan_of` makes the plan. Only this file decides
which spans are exact.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

import torch

from ragkv.control import Method
from ragkv.fusion import Plan, Span, SpanKind, SpanState
from ragkv.prompt.history import Block, exact_blocks
from ragkv.store import Lease, ids_digest

from .prompt import Prompt

# The first tokens of the prompt's first chunk are computed in place. There they are the prompt's
# attention sinks, and the stored KV has seen others (docs/research/selection.md).
LEADING_TOKENS = 64


class Why(StrEnum):
    """Why KV is computed and not reused. The values are the report's sentences."""

    FULL_RECOMPUTE = "the request asks for a full recompute"
    ONLY_EXACT = "the request asks for exact reuse, and no earlier prompt began like this one"
    MISSED = "no usable KV was stored yet"
    DAMAGED = "the stored KV is damaged, and is made again for the next request"
    LEADING = "the first tokens of a prompt are computed"
    NOT_EXACT = "the stored KV is not exact here, and the request asks for exact reuse"
    OTHER_PREFIX = "it stood behind another prefix"
    OTHER_FREQUENCIES = "the RoPE frequencies changed"
    WAS_INEXACT = "it was not exact"
    LOST = "its block was lost"


@dataclass(frozen=True, slots=True)
class Wanted:
    """Whether the stored KV of a chunk or block is of use, known before it is looked up."""

    is_exact: bool = False  # it was made after exactly the tokens that precede it in this prompt
    why_not: str | None = None  # None: it is wanted; "": it is not, and nothing is said

    @property
    def is_wanted(self) -> bool:
        """Whether it is looked up."""
        return self.why_not is None


@dataclass(frozen=True, slots=True)
class WantedRuns:
    """What is looked up for one prompt."""

    frequencies: str  # digest of the prompt's RoPE frequencies
    blocks: tuple[Wanted, ...]  # one for each block of the history
    chunks: tuple[Wanted, ...]


@dataclass(frozen=True, slots=True)
class Found:
    """The leases of a prompt's stored KV. `None`: it is not stored, or was not wanted."""

    prefix: Lease | None
    blocks: tuple[Lease | None, ...]  # one for each block of the history
    chunks: tuple[Lease | None, ...]
    damaged: frozenset[int] = frozenset()  # chunks whose entry was found damaged by this request
    earlier: tuple[Lease, ...] = ()  # exact blocks of earlier prompts, from the history's end on
    away: tuple[str, ...] = ()  # kinds of storage that do not answer


def wanted(prompt: Prompt, method: Method, frequencies: str) -> WantedRuns:
    """The stored KV to look up for `prompt`; `frequencies` digests its RoPE frequencies."""
    blocks = prompt.history.blocks
    exact = exact_blocks(prompt.prefix, blocks, frequencies)
    prefix_digest = ids_digest(prompt.prefix)

    def block_wanted(block: Block, is_exact: bool) -> Wanted:
        if method.reuse == "none":
            return Wanted(is_exact, "")
        if block.prefix_digest != prefix_digest:
            return Wanted(is_exact, Why.OTHER_PREFIX)
        if block.frequencies != frequencies:
            return Wanted(is_exact, Why.OTHER_FREQUENCIES)
        if not is_exact and method.inexact_use == "recompute":
            return Wanted(is_exact, Why.WAS_INEXACT)
        return Wanted(is_exact)

    def chunk_wanted(index: int) -> Wanted:
        if index in prompt.plain:
            return Wanted(why_not="")
        if method.reuse == "none":
            return Wanted(why_not=Why.FULL_RECOMPUTE)
        if method.reuse == "prefix":
            return Wanted(why_not=Why.ONLY_EXACT)
        return Wanted(is_exact=_leads(prompt, index))

    return WantedRuns(
        frequencies,
        tuple(block_wanted(*one) for one in zip(blocks, exact, strict=True)),
        tuple(map(chunk_wanted, range(len(prompt.chunks)))),
    )


def plan_of(prompt: Prompt, method: Method, wanted: WantedRuns, found: Found) -> Plan:
    """The plan of a prompt of which `found` is stored."""
    length = len(prompt.token_ids)
    prefix = len(prompt.prefix)
    spans: list[Span] = []
    if prefix:
        state = SpanState.COMPUTED if found.prefix is None else SpanState.EXACT
        spans.append(Span(SpanKind.PREFIX, 0, prefix, state, found.prefix))
    spans += _history_spans(prompt, method, wanted, found)
    spans += _chunk_spans(prompt, wanted, found)
    if prompt.question:
        start = length - len(prompt.question)
        spans.append(Span(SpanKind.QUESTION, start, length, SpanState.COMPUTED))
    if found.earlier:
        spans = _with_blocks(spans, found.earlier, prefix + len(prompt.history))
    missed = tuple(
        index
        for index, (run, lease) in enumerate(zip(wanted.chunks, found.chunks, strict=True))
        if run.is_wanted and lease is None
    )
    lost = {
        index: run.why_not or Why.LOST
        for index, (run, lease) in enumerate(zip(wanted.blocks, found.blocks, strict=True))
        if lease is None and run.why_not != ""
    }
    notes = (*_lost_notes(prompt, lost), *_away_notes(method, found, missed))
    return Plan.of(torch.tensor(prompt.token_ids), spans, missed, tuple(lost), notes)


def _leads(prompt: Prompt, index: int) -> bool:
    """Whether the chunk follows directly the prefix with which entries are encoded."""
    return index == 0 and not prompt.history and prompt.own_prefix


def _history_spans(
    prompt: Prompt, method: Method, wanted: WantedRuns, found: Found
) -> Iterator[Span]:
    """The history's spans, in order: its blocks, then the tail, which has no stored KV."""
    at = len(prompt.prefix)
    runs = zip(prompt.history.blocks, wanted.blocks, found.blocks, strict=True)
    for block, run, lease in runs:
        state = _block_state(block, run, lease, method)
        stop = at + len(block)
        if state is SpanState.COMPUTED:
            yield Span(SpanKind.HISTORY, at, stop, state)
        else:
            yield Span(SpanKind.HISTORY, at, stop, state, lease, None, block.start)
        at = stop
    if prompt.history.tail:
        stop = at + len(prompt.history.tail)
        yield Span(SpanKind.HISTORY, at, stop, SpanState.COMPUTED)


def _block_state(block: Block, run: Wanted, lease: Lease | None, method: Method) -> SpanState:
    if lease is None:
        return SpanState.COMPUTED
    if run.is_exact and lease.info.lossless:
        return SpanState.EXACT
    if method.inexact_use == "recompute":  # it was wanted as exact, and a codec has rounded it
        return SpanState.COMPUTED
    # Only a turn that fused chunks leaves tokens to choose from. Truncation, a codec that rounds,
    # an answer decoded with KCache and what saw any of these are used as they are.
    is_choice = method.inexact_use == "select" and block.fused
    return SpanState.FUSED if is_choice else SpanState.APPROXIMATE


def _chunk_spans(prompt: Prompt, wanted: WantedRuns, found: Found) -> Iterator[Span]:
    """The spans of chunks and of the text between them, in order."""
    at = len(prompt.prefix) + len(prompt.history)
    for ids, index in prompt.body:
        stop = at + len(ids)
        if index is None:
            yield Span(SpanKind.TEXT, at, stop, SpanState.COMPUTED)
        elif (lease := found.chunks[index]) is None:
            why = wanted.chunks[index].why_not
            if why is None:
                why = Why.DAMAGED if index in found.damaged else Why.MISSED
            yield Span(SpanKind.CHUNK, at, stop, SpanState.COMPUTED, chunk=index, why=why)
        else:
            offset = prompt.excerpts[index].offset if index in prompt.excerpts else 0
            fused = Span(SpanKind.CHUNK, at, stop, SpanState.FUSED, lease, index, offset)
            yield from _stored_chunk(fused, wanted.chunks[index], wanted.frequencies)
        at = stop


def _stored_chunk(fused: Span, run: Wanted, frequencies: str) -> Iterator[Span]:
    """The spans of a chunk whose entry was found."""
    assert fused.lease is not None
    info = fused.lease.info
    if not run.is_exact:
        yield fused
    elif not info.is_expected:  # encoded directly after the prefix, as in this prompt
        is_exact = info.lossless and info.frequencies == frequencies
        yield replace(fused, state=SpanState.EXACT) if is_exact else fused
    elif len(fused) <= LEADING_TOKENS:
        yield replace(fused, state=SpanState.COMPUTED, lease=None, offset=0, why=Why.LEADING)
    else:
        cut = fused.start + LEADING_TOKENS
        computed = SpanState.COMPUTED
        yield replace(fused, stop=cut, state=computed, lease=None, offset=0, why=Why.LEADING)
        yield replace(fused, start=cut, offset=fused.offset + LEADING_TOKENS)


def _with_blocks(spans: Sequence[Span], blocks: Sequence[Lease], start: int) -> list[Span]:
    """`spans` with the tokens that `blocks` hold, from position `start` on, reused exactly."""
    changed: list[Span] = []
    places = []
    for lease in blocks:
        places.append((start, start + len(lease.info.token_ids), lease))
        start = places[-1][1]
    for span in spans:
        at = span.start
        for low, high, lease in places if span.state is SpanState.COMPUTED else ():
            if max(low, at) < min(high, span.stop):
                stop = min(high, span.stop)
                exact = replace(span, start=at, stop=stop, state=SpanState.EXACT, lease=lease)
                changed.append(replace(exact, offset=at - low, why=None))
                at = stop
        if at < span.stop:
            changed.append(replace(span, start=at))
    return changed


def _lost_notes(prompt: Prompt, lost: Mapping[int, str]) -> Iterator[str]:
    """Notes that say why history is computed."""
    tokens = Counter[str]()
    for index, why in lost.items():
        tokens[why] += len(prompt.history.blocks[index])
    yield from (f"{count} history tokens recomputed: {why}" for why, count in tokens.items())


def _away_notes(method: Method, found: Found, missed: Sequence[int]) -> Iterator[str]:
    """Notes that name the storage that did not answer, and what that cost."""
    if method.reuse == "none":
        return
    without = (
        f"{len(missed)} chunks that are not stored here were computed"
        if missed
        else "no chunk was missing here"
    )
    yield from (f"{kind} does not answer: {without}" for kind in found.away)
