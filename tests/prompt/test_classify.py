"""What becomes of a chunk, a block and the prefix: one row a situation. Which KV is exact is
decided here alone.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch

from ragkv.fusion import SpanKind, SpanState, make_selector
from ragkv.prompt import PrefillMethod, Prompt
from ragkv.prompt.classify import FoundPrompt, FoundRun, Planned, classify, wishes
from ragkv.prompt.history import EMPTY, Block, Chain, History
from ragkv.store import Entry, EntryInfo, Identity, MemoryLease, ids_digest

PREFIX = (1, 2)
A = (3, 4, 5)
B = (6, 7)
QUESTION = (8,)
HERE = "frequencies of this prompt"
SELECTOR = make_selector("first-k")
FUSED = PrefillMethod(0.5, SELECTOR, "fused")
EXACT_ONLY = replace(FUSED, reuse="prefix")
NOTHING = replace(FUSED, reuse="none")
EVERYTHING = replace(FUSED, ratio=1.0)


def stored(ids: tuple[int, ...] = A, frequencies: str = HERE, codec: str = "raw") -> FoundRun:
    identity = Identity(
        "weights", "architecture", "rope", "float32", "", "tokenizer", "context", codec=codec
    )
    info = EntryInfo(identity.key(ids), identity, ids, frequencies, 1, 1, 2)
    return FoundRun(MemoryLease(Entry(info, torch.zeros(1, 2, 1, len(ids), 2))))


MISSING = FoundRun()
DAMAGED = FoundRun(is_damaged=True)


def planned(
    prompt: Prompt, method: PrefillMethod, *runs: FoundRun, prefix: FoundRun = MISSING
) -> Planned:
    """The plan of a prompt of which `runs` are stored, those of history first, as far as they are
    wanted.
    """
    wished = wishes(prompt, method, HERE)
    wanted = [wish.is_wanted for wish in (*wished.blocks, *wished.chunks)]
    found = tuple(run if use else MISSING for run, use in zip(runs, wanted, strict=True))
    blocks = len(wished.blocks)
    return classify(
        prompt, method, wished, FoundPrompt(prefix.lease, found[:blocks], found[blocks:])
    )


def prompt_of(*chunks: tuple[int, ...], **more: Any) -> Prompt:
    return Prompt(
        **{"prefix": PREFIX, "history": EMPTY, "chunks": chunks, "question": QUESTION, **more}
    )


def states(plan: Planned, kind: SpanKind) -> list[SpanState]:
    return [span.state for span in plan.plan.spans if span.kind is kind]


@pytest.mark.parametrize(
    ("run", "method", "state", "why"),
    [
        (stored(), FUSED, SpanState.EXACT, None),
        (stored(), EXACT_ONLY, SpanState.EXACT, None),
        (stored(), EVERYTHING, SpanState.EXACT, None),
        (stored(), NOTHING, SpanState.COMPUTED, "full recompute"),
        (stored(codec="int8"), FUSED, SpanState.FUSED, None),
        (stored(codec="int8"), EXACT_ONLY, SpanState.COMPUTED, "compressed"),
        (stored(frequencies="of another length"), FUSED, SpanState.FUSED, None),
        (
            stored(frequencies="of another length"),
            EXACT_ONLY,
            SpanState.COMPUTED,
            "other RoPE frequencies",
        ),
        (MISSING, FUSED, SpanState.COMPUTED, "no usable KV"),
        (DAMAGED, FUSED, SpanState.COMPUTED, "damaged"),
    ],
)
def test_a_chunk_right_behind_the_prefix(
    run: FoundRun, method: PrefillMethod, state: SpanState, why: str | None
) -> None:
    plan = planned(prompt_of(A), method, run)
    assert states(plan, SpanKind.CHUNK) == [state]
    assert (why is None and not plan.unused) or why in plan.unused[0]
    assert plan.missed == ((0,) if run.lease is None else ())


@pytest.mark.parametrize(
    ("prompt", "method", "state", "why"),
    [
        (prompt_of(B, A), FUSED, SpanState.FUSED, None),
        (prompt_of(B, A), EXACT_ONLY, SpanState.COMPUTED, "only a passage right behind the prefix"),
        (prompt_of(B, A, own_prefix=False), FUSED, SpanState.FUSED, None),
        (prompt_of(B, A, plain=frozenset({0})), FUSED, SpanState.FUSED, None),
        (prompt_of(B, A, history=History(tail=(9,))), FUSED, SpanState.FUSED, None),
    ],
)
def test_a_chunk_behind_another_one_is_never_exact(
    prompt: Prompt, method: PrefillMethod, state: SpanState, why: str | None
) -> None:
    plan = planned(prompt, method, stored(B), stored(A))
    assert states(plan, SpanKind.CHUNK)[-1] is state
    assert (why is None and 1 not in plan.unused) or why in plan.unused[1]


def test_text_is_computed_and_a_separator_stands_behind_each_chunk_that_no_text_follows() -> None:
    """It never stands before the first chunk, which so stays exact."""
    found = [stored(A), MISSING, stored(B), stored(A)]
    plan = planned(prompt_of(A, (9,), B, A, plain=frozenset({1}), separator=(10,)), FUSED, *found)
    assert plan.plan.token_ids.tolist() == [*PREFIX, *A, 9, *B, 10, *A, 10, *QUESTION]
    assert [
        (span.chunk, span.start) for span in plan.plan.spans if span.kind is SpanKind.CHUNK
    ] == [
        (0, 2),
        (2, 6),
        (3, 9),
    ]
    assert states(plan, SpanKind.CHUNK) == [SpanState.EXACT, SpanState.FUSED, SpanState.FUSED]
    assert states(plan, SpanKind.TEXT) == [SpanState.COMPUTED] * 3
    assert (plan.missed, plan.unused) == ((), {})


@pytest.mark.parametrize(
    "more", [dict(own_prefix=False), dict(history=History(tail=(9,))), dict(prefix=())]
)
def test_the_first_chunk_is_exact_only_behind_the_applications_prefix_alone(
    more: dict[str, Any],
) -> None:
    # an application without a prefix: nothing precedes the chunk, here as when it was made
    is_exact = "prefix" in more
    state = SpanState.EXACT if is_exact else SpanState.FUSED
    assert states(planned(prompt_of(A, **more), FUSED, stored()), SpanKind.CHUNK) == [state]


def test_the_prefix_is_exact_if_its_kv_is_there_and_the_question_is_always_computed() -> None:
    for run, state in ((stored(PREFIX), SpanState.EXACT), (MISSING, SpanState.COMPUTED)):
        plan = planned(prompt_of(), FUSED, prefix=run)
        assert states(plan, SpanKind.PREFIX) == [state]
        assert states(plan, SpanKind.QUESTION) == [SpanState.COMPUTED]
        assert plan.plan.token_ids.tolist() == [*PREFIX, *QUESTION]


def block(**more: Any) -> Block:
    """A block that stood right behind the prefix, as it does here."""
    context = Chain(PREFIX).context(HERE)
    return replace(Block(context, ids_digest(PREFIX), HERE, A, 0, 0, len(A)), **more)


TAINTED = Chain(PREFIX).context(HERE, "taint")  # saw something inexact
KEPT = replace(FUSED, inexact_history="keep")
RECOMPUTED = replace(FUSED, inexact_history="recompute")


@pytest.mark.parametrize(
    ("history", "run", "method", "state", "note"),
    [
        (block(), stored(), FUSED, SpanState.EXACT, None),
        (block(), stored(), EXACT_ONLY, SpanState.EXACT, None),
        (block(), stored(), NOTHING, SpanState.COMPUTED, None),
        (block(), MISSING, FUSED, SpanState.COMPUTED, "its block was lost"),
        (block(), stored(codec="int8"), FUSED, SpanState.APPROXIMATE, None),
        (
            block(prefix_digest="of another"),
            stored(),
            FUSED,
            SpanState.COMPUTED,
            "behind another prefix",
        ),
        (
            block(frequencies="of another length"),
            stored(),
            FUSED,
            SpanState.COMPUTED,
            "RoPE frequencies changed",
        ),
        (block(start=1), stored(), FUSED, SpanState.APPROXIMATE, None),
        (block(context=TAINTED), stored(), FUSED, SpanState.APPROXIMATE, None),
        (block(context=TAINTED), stored(), EXACT_ONLY, SpanState.COMPUTED, "it was not exact"),
        (block(context=TAINTED), stored(), RECOMPUTED, SpanState.COMPUTED, "it was not exact"),
        (block(context=TAINTED), stored(), EVERYTHING, SpanState.COMPUTED, "it was not exact"),
        (block(context=TAINTED, fused=True), stored(), FUSED, SpanState.FUSED, None),
        (block(context=TAINTED, fused=True), stored(), KEPT, SpanState.APPROXIMATE, None),
    ],
)
def test_a_block_of_the_history(
    history: Block, run: FoundRun, method: PrefillMethod, state: SpanState, note: str | None
) -> None:
    plan = planned(prompt_of(history=History((history,))), method, run)
    assert states(plan, SpanKind.HISTORY) == [state]
    assert (note is None and not plan.notes) or any(note in one for one in plan.notes)
    assert plan.recomputed_blocks == ((0,) if note and state is SpanState.COMPUTED else ())


def test_a_plan_reads_only_what_it_uses() -> None:
    for method in (FUSED, EXACT_ONLY, NOTHING):
        plan = planned(prompt_of(A, B), method, stored(A), stored(B))
        for span in plan.plan.spans:
            assert (span.lease is None) == (span.state is SpanState.COMPUTED)
