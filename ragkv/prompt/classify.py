"""What becomes of every run of a prompt: exact, fused or computed. Pure: nothing is looked up,
opened or changed here.

The planner asks `wishes` first, which knows from the places in the prompt what stored KV is wanted;
then it looks that up; then `classify` makes the plan of what was found. Which spans are exact is
decided in this file and nowhere else.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch

from ragkv.fusion import Plan, Span, SpanKind, SpanState
from ragkv.prompt.history import Block, exact_blocks
from ragkv.store import Lease, ids_digest

from .request import PrefillMethod, Prompt


@dataclass(frozen=True, slots=True)
class RunWish:
    """Whether the stored KV of a chunk or block is wanted. Known before it is looked up."""

    is_exact: bool  # it was made behind just the tokens that precede it in this prompt
    is_wanted: bool = True
    why_not: str = ""  # for the report; "": it says nothing


@dataclass(frozen=True, slots=True)
class Wishes:
    """What is wanted of the store for one prompt."""

    frequencies: str  # digest of the prompt's RoPE frequencies
    blocks: tuple[RunWish, ...]  # one for each block of the history
    chunks: tuple[RunWish, ...]


@dataclass(frozen=True, slots=True)
class FoundRun:
    """What is stored of a chunk or block."""

    lease: Lease | None = None  # None: nothing usable is stored, or nothing was wanted
    # an entry was there, and was found damaged while it was read for this request
    is_damaged: bool = False
    # it is computed: what is stored is not exact here, and exact KV is made behind this request
    in_place: bool = False


@dataclass(frozen=True, slots=True)
class FoundPrompt:
    """What is stored of a prompt."""

    prefix: Lease | None  # None: the prefix is computed
    blocks: tuple[FoundRun, ...]  # one for each block of the history
    chunks: tuple[FoundRun, ...]
    away: tuple[str, ...] = ()  # kinds of storage that do not answer


@dataclass(frozen=True, slots=True)
class Planned:
    """A plan, and what the store could not give for it."""

    plan: Plan
    missed: tuple[int, ...]  # indices of chunks that were looked up and have no usable entry
    # why KV is not reused, by the index of the chunk
    unused: Mapping[int, str] = field(default_factory=dict)
    # indices of history blocks that this pass computes, to be stored again
    recomputed_blocks: tuple[int, ...] = ()
    notes: tuple[str, ...] = ()  # what became of inexact history, and which storage does not answer


def wishes(prompt: Prompt, method: PrefillMethod, frequencies: str) -> Wishes:
    """What stored KV is wanted for `prompt`, whose RoPE frequencies have the digest
    `frequencies`.
    """
    prefix = prompt.prefix
    blocks = prompt.history.blocks
    found = zip(blocks, exact_blocks(prefix, blocks, frequencies), strict=True)
    digest = ids_digest(prefix)
    approximate = method.inexact_use != "recompute"

    def block_wish(block: Block, is_exact: bool) -> RunWish:
        if method.reuse == "none":
            return RunWish(is_exact, is_wanted=False)
        if block.prefix_digest != digest:
            return RunWish(is_exact, is_wanted=False, why_not="it stood behind another prefix")
        if block.frequencies != frequencies:
            return RunWish(is_exact, is_wanted=False, why_not="the RoPE frequencies changed")
        if not (is_exact or approximate):
            return RunWish(is_exact, is_wanted=False, why_not="it was not exact")
        return RunWish(is_exact)

    def chunk_wish(index: int) -> RunWish:
        # A chunk right behind the application's prefix was encoded behind exactly what precedes it
        # here.
        is_exact = index == 0 and not prompt.history and prompt.own_prefix
        if index in prompt.plain:
            return RunWish(is_exact, is_wanted=False)
        if method.reuse == "none":
            return RunWish(
                is_exact, is_wanted=False, why_not="the request asks for a full recompute"
            )
        if method.reuse == "prefix" and not is_exact:
            only = (
                "the request asks for exact reuse, which only a passage right behind the "
                "prefix can have"
            )
            return RunWish(is_exact, is_wanted=False, why_not=only)
        return RunWish(is_exact)

    return Wishes(
        frequencies,
        tuple(block_wish(block, is_exact) for block, is_exact in found),
        tuple(map(chunk_wish, range(len(prompt.chunks)))),
    )


def classify(prompt: Prompt, method: PrefillMethod, wished: Wishes, found: FoundPrompt) -> Planned:
    """The plan of a prompt of which `found` is stored."""
    length = len(prompt.token_ids)
    prefix = len(prompt.prefix)
    spans: list[Span] = []
    if prefix:
        state = SpanState.COMPUTED if found.prefix is None else SpanState.EXACT
        spans.append(Span(SpanKind.PREFIX, 0, prefix, state, found.prefix))
    chunks = list(_chunk_spans(prompt, method, wished, found))
    spans += [*_history_spans(prompt, method, wished, found), *chunks]
    if prompt.question:
        spans.append(
            Span(SpanKind.QUESTION, length - len(prompt.question), length, SpanState.COMPUTED)
        )

    runs = zip(wished.chunks, found.chunks, strict=True)
    missed = tuple(
        index for index, (wish, run) in enumerate(runs) if wish.is_wanted and run.lease is None
    )
    unused = {
        span.chunk: _why_unused(wished.chunks[span.chunk], found.chunks[span.chunk])
        for span in chunks
        if span.state is SpanState.COMPUTED and span.chunk is not None
    }
    lost = {
        index: wish.why_not or "its block was lost"
        for index, (wish, run) in enumerate(zip(wished.blocks, found.blocks, strict=True))
        if run.lease is None and (wish.is_wanted or wish.why_not)
    }
    without = (
        f"{len(missed)} chunks that are not stored here were computed"
        if missed
        else "no chunk was missing here"
    )
    away = (f"{kind} does not answer: {without}" for kind in found.away if method.reuse != "none")
    notes = (*_history_notes(prompt, lost), *away)
    return Planned(
        Plan.of(torch.tensor(prompt.token_ids), spans),
        missed,
        unused,
        tuple(lost),
        notes,
    )


def _history_spans(
    prompt: Prompt, method: PrefillMethod, wished: Wishes, found: FoundPrompt
) -> Iterator[Span]:
    """The history's spans, in order: its blocks, then the tail, which no KV is stored of."""
    at = len(prompt.prefix)
    for block, wish, run in zip(prompt.history.blocks, wished.blocks, found.blocks, strict=True):
        state = _block_state(block, wish, run, method)
        stop = at + len(block)
        if state is SpanState.COMPUTED:
            yield Span(SpanKind.HISTORY, at, stop, state)
        else:
            yield Span(SpanKind.HISTORY, at, stop, state, run.lease, None, block.start)
        at = stop
    if prompt.history.tail:
        yield Span(SpanKind.HISTORY, at, at + len(prompt.history.tail), SpanState.COMPUTED)


def _block_state(block: Block, wish: RunWish, run: FoundRun, method: PrefillMethod) -> SpanState:
    if run.lease is None:
        return SpanState.COMPUTED
    if wish.is_exact and run.lease.info.lossless:
        return SpanState.EXACT
    if method.inexact_use == "recompute":  # it was wanted as exact, and a codec has rounded it
        return SpanState.COMPUTED
    # Only a turn that fused chunks leaves tokens to choose from. Truncation, a codec that rounds, an
    # answer decoded with KCache and what saw any of these are used as they are.
    if method.inexact_use == "select" and block.fused:
        return SpanState.FUSED
    return SpanState.APPROXIMATE


def _chunk_spans(
    prompt: Prompt, method: PrefillMethod, wished: Wishes, found: FoundPrompt
) -> Iterator[Span]:
    """The spans of chunks and of the text between them, in order."""
    at = len(prompt.prefix) + len(prompt.history)
    for ids, index in prompt.body:
        stop = at + len(ids)
        if index is None:
            yield Span(SpanKind.TEXT, at, stop, SpanState.COMPUTED)
        else:
            run = found.chunks[index]
            state = _chunk_state(wished.chunks[index], run, method, wished.frequencies)
            lease = None if state is SpanState.COMPUTED else run.lease
            offset = prompt.excerpts[index].offset if index in prompt.excerpts else 0
            yield Span(SpanKind.CHUNK, at, stop, state, lease, index, offset)
        at = stop


def _chunk_state(
    wish: RunWish, run: FoundRun, method: PrefillMethod, frequencies: str
) -> SpanState:
    if run.lease is None:
        return SpanState.COMPUTED
    info = run.lease.info
    if wish.is_exact and info.lossless and not info.is_expected and info.frequencies == frequencies:
        return SpanState.EXACT
    # Expected KV suits a prompt's beginning badly (docs/selection.md); computed KV gives the answer
    # that exact KV will.
    return SpanState.FUSED if method.reuse == "fused" and not run.in_place else SpanState.COMPUTED


def _why_unused(wish: RunWish, run: FoundRun) -> str:
    """Why a chunk's KV is computed."""
    if not wish.is_wanted:
        return wish.why_not
    if run.is_damaged:
        return "the stored KV is damaged, and is made again for the next request"
    if run.lease is None:
        return "no usable KV was stored yet"
    if run.lease.info.is_expected:
        return "the stored KV is not exact here; exact KV is stored for the next request"
    return "the stored KV is not exact here: it is compressed, or made under other RoPE frequencies"


def _history_notes(prompt: Prompt, lost: Mapping[int, str]) -> Iterator[str]:
    """Why history is computed: the reasons in `lost`, by the index of the block."""
    tokens = Counter[str]()
    for index, why in lost.items():
        tokens[why] += len(prompt.history.blocks[index])
    yield from (f"{count} history tokens recomputed: {why}" for why, count in tokens.items())
