"""What becomes of a chunk, a block and the prefix: one row a situation. Which KV is exact is
decided here alone.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch

from ragkv.control import Method
from ragkv.fusion import Plan, SpanKind, SpanState, make_selector
from ragkv.prompt import Prompt
from ragkv.prompt.history import Block, Chain, History
from ragkv.prompt.planning import LEADING_TOKENS, plan_of, wanted_spans
from ragkv.store.entry import Entry, EntryInfo, Identity, ids_digest
from ragkv.store.tiers import MemoryLease
from ragkv.types import Chunk, Excerpt, Piece, Text

PREFIX = (1, 2)
A = (3, 4, 5)
B = (6, 7)
QUESTION = (8,)
HERE = "frequencies of this prompt"
SELECTOR = make_selector("first-k")
FUSED = Method(0.5, SELECTOR, "fused")
EXACT_ONLY = replace(FUSED, reuse="prefix")
NOTHING = replace(FUSED, reuse="none")
EVERYTHING = replace(FUSED, ratio=1.0)


def stored(
    ids: tuple[int, ...] = A, rope_digest: str = HERE, codec: str = "raw", neutral: str = ""
) -> MemoryLease:
    identity = Identity(
        "weights",
        "architecture",
        "rope",
        "float32",
        "",
        "tokenizer",
        "context",
        codec=codec,
        neutral=neutral,
    )
    info = EntryInfo(identity.key(ids), identity, ids, rope_digest, 1, 1, 2)
    return MemoryLease(Entry(info, torch.zeros(1, 2, 1, len(ids), 2)))


MISSING = None


def planned(
    prompt: Prompt,
    method: Method,
    *leases: MemoryLease | None,
    prefix: MemoryLease | None = None,
    damaged: frozenset[int] = frozenset(),
    earlier: tuple[MemoryLease, ...] = (),
) -> Plan:
    """The plan of a prompt of which `leases` are stored, those of history first, as far as they are
    wanted.
    """
    blocks = iter(leases)
    found = []
    for run in wanted_spans(prompt, method, HERE):
        lease = prefix if run.kind is SpanKind.PREFIX else None
        if run.block is not None:
            lease = next(blocks)
        elif run.chunk is not None:
            lease = leases[len(prompt.blocks) + run.chunk]
        is_wanted = run.state is not SpanState.COMPUTED
        found.append(replace(run, lease=lease if is_wanted else None))
    return plan_of(prompt, method, found, HERE, damaged=damaged, earlier=earlier)


def prompt_of(*pieces: tuple[int, ...] | Piece, **more: Any) -> Prompt:
    given = tuple(one if isinstance(one, Piece) else Chunk(one) for one in pieces)
    return Prompt(**{"prefix": PREFIX, "pieces": given, "tail": QUESTION, **more})


def states(plan: Plan, kind: SpanKind) -> list[SpanState]:
    return [span.state for span in plan.spans if span.kind is kind]


def reasons(plan: Plan, chunk: int = 0) -> list[str | None]:
    return [span.why for span in plan.spans if span.chunk == chunk]


@pytest.mark.parametrize(
    ("lease", "method", "state", "why"),
    [
        (stored(), FUSED, SpanState.EXACT, None),
        (stored(), EVERYTHING, SpanState.EXACT, None),
        (stored(), NOTHING, SpanState.COMPUTED, "full recompute"),
        (stored(), EXACT_ONLY, SpanState.COMPUTED, "no earlier prompt began like this one"),
        (stored(codec="int8"), FUSED, SpanState.FUSED, None),
        (stored(rope_digest="of another"), FUSED, SpanState.FUSED, None),
        (stored(neutral="text"), FUSED, SpanState.COMPUTED, "first tokens of a prompt"),
        (MISSING, FUSED, SpanState.COMPUTED, "no usable KV"),
    ],
)
def test_a_short_chunk_right_behind_the_prefix(
    lease: MemoryLease | None, method: Method, state: SpanState, why: str | None
) -> None:
    plan = planned(prompt_of(A), method, lease)
    assert states(plan, SpanKind.CHUNK) == [state]
    assert reasons(plan) == [None] if why is None else why in str(reasons(plan)[0])
    assert plan.missed == ((0,) if lease is None else ())


def test_an_excerpt_that_begins_later_than_its_chunk_is_never_exact() -> None:
    """Its KV saw the chunk's first token, which is not in the prompt."""
    for offset, state in ((0, SpanState.EXACT), (1, SpanState.FUSED)):
        part = A[offset : offset + 2]
        prompt = prompt_of(Excerpt(part, whole=A, offset=offset))
        spans = [span for span in planned(prompt, FUSED, stored()).spans if span.chunk == 0]
        assert [(span.state, span.offset) for span in spans] == [(state, offset)]


def test_a_damaged_entry_is_a_miss_that_says_so() -> None:
    plan = planned(prompt_of(A), FUSED, MISSING, damaged=frozenset({0}))
    assert plan.missed == (0,) and "damaged" in str(reasons(plan)[0])


def test_a_leading_chunk_is_fused_and_its_first_tokens_are_computed_in_place() -> None:
    long = tuple(range(100, 100 + LEADING_TOKENS + 5))
    lease = stored(long, codec="int8", neutral="text")
    spans = [s for s in planned(prompt_of(long, A), FUSED, lease, stored()).spans if s.chunk == 0]
    cut = len(PREFIX) + LEADING_TOKENS
    assert [(s.start, s.stop, s.state, s.offset) for s in spans] == [
        (len(PREFIX), cut, SpanState.COMPUTED, 0),
        (cut, cut + 5, SpanState.FUSED, LEADING_TOKENS),
    ]
    assert (spans[0].lease, spans[1].lease) == (None, lease)


def test_the_first_tokens_of_a_prompt_without_a_prefix_are_computed_in_place() -> None:
    """They are its attention sinks. KV that was encoded behind the prefix is not exact there."""
    long = tuple(range(100, 100 + LEADING_TOKENS + 5))
    prompt = prompt_of(long, A, prefix=(), own_prefix=False)
    expected = planned(prompt, FUSED, stored(long, neutral="text"), stored())
    assert [(s.start, s.state) for s in expected.spans if s.chunk == 0] == [
        (0, SpanState.COMPUTED),
        (LEADING_TOKENS, SpanState.FUSED),
    ]
    alone = planned(prompt, FUSED, stored(long), stored())
    assert states(alone, SpanKind.CHUNK) == [SpanState.FUSED] * 2


@pytest.mark.parametrize(
    "prompt",
    [
        prompt_of(B, A),
        prompt_of(B, A, own_prefix=False),
        prompt_of(Text(B), A),
        prompt_of(B, A, history=History(tail=(9,))),
    ],
)
def test_a_chunk_behind_other_tokens_is_never_exact(prompt: Prompt) -> None:
    plan = planned(prompt, FUSED, stored(B), stored(A))
    assert states(plan, SpanKind.CHUNK)[-1] is SpanState.FUSED
    assert reasons(plan, len(prompt.chunks) - 1) == [None]


def test_blocks_of_an_earlier_prompt_are_exact_wherever_they_begin_and_end() -> None:
    """Two blocks of two tokens: the first ends within A, the second goes on into the separator."""
    earlier = (stored((3, 4)), stored((5, 10)))
    prompt = prompt_of(A, B, separator=(10,))
    plan = planned(prompt, EXACT_ONLY, None, None, prefix=stored(PREFIX), earlier=earlier)
    found = [(s.kind.value, s.start, s.stop, s.state.value, s.offset) for s in plan.spans]
    assert found == [
        ("prefix", 0, 2, "exact", 0),
        ("chunk", 2, 4, "exact", 0),
        ("chunk", 4, 5, "exact", 0),
        ("template", 5, 6, "exact", 1),
        ("chunk", 6, 8, "computed", 0),
        ("template", 8, 9, "computed", 0),
        ("question", 9, 10, "computed", 0),
    ]
    assert plan.computed.tolist() == [6, 7, 8, 9]


def test_text_is_computed_and_a_separator_stands_behind_each_chunk_that_no_text_follows() -> None:
    """It never stands before the first chunk, which so stays exact."""
    found = [stored(A), stored(B), stored(A)]
    plan = planned(prompt_of(A, Text((9,)), B, A, separator=(10,)), FUSED, *found)
    assert plan.token_ids.tolist() == [*PREFIX, *A, 9, *B, 10, *A, 10, *QUESTION]
    assert [(span.chunk, span.start) for span in plan.spans if span.kind is SpanKind.CHUNK] == [
        (0, 2),
        (1, 6),
        (2, 9),
    ]
    assert states(plan, SpanKind.CHUNK) == [SpanState.EXACT, SpanState.FUSED, SpanState.FUSED]
    assert states(plan, SpanKind.TEMPLATE) == [SpanState.COMPUTED] * 3
    assert plan.missed == () and reasons(plan, 2) == [None]


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
    for lease, state in ((stored(PREFIX), SpanState.EXACT), (MISSING, SpanState.COMPUTED)):
        plan = planned(prompt_of(), FUSED, prefix=lease)
        assert states(plan, SpanKind.PREFIX) == [state]
        assert states(plan, SpanKind.QUESTION) == [SpanState.COMPUTED]
        assert plan.token_ids.tolist() == [*PREFIX, *QUESTION]


def block(**more: Any) -> Block:
    """A block that stood right behind the prefix, as it does here."""
    seen = Chain(PREFIX).digest(HERE)
    return replace(Block(seen, ids_digest(PREFIX), HERE, A, 0, 0, len(A)), **more)


TAINTED = Chain(PREFIX).digest(HERE, "taint")  # saw something inexact
KEPT = replace(FUSED, inexact_history="keep")
RECOMPUTED = replace(FUSED, inexact_history="recompute")


@pytest.mark.parametrize(
    ("history", "lease", "method", "state", "note"),
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
            block(rope_digest="of another length"),
            stored(),
            FUSED,
            SpanState.COMPUTED,
            "RoPE frequencies changed",
        ),
        (block(start=1), stored(), FUSED, SpanState.APPROXIMATE, None),
        (block(seen_digest=TAINTED), stored(), FUSED, SpanState.APPROXIMATE, None),
        (block(seen_digest=TAINTED), stored(), EXACT_ONLY, SpanState.COMPUTED, "it was not exact"),
        (block(seen_digest=TAINTED), stored(), RECOMPUTED, SpanState.COMPUTED, "it was not exact"),
        (block(seen_digest=TAINTED), stored(), EVERYTHING, SpanState.COMPUTED, "it was not exact"),
        (block(seen_digest=TAINTED, fused=True), stored(), FUSED, SpanState.FUSED, None),
        (block(seen_digest=TAINTED, fused=True), stored(), KEPT, SpanState.APPROXIMATE, None),
    ],
)
def test_a_block_of_the_history(
    history: Block,
    lease: MemoryLease | None,
    method: Method,
    state: SpanState,
    note: str | None,
) -> None:
    plan = planned(prompt_of(history=History((history,))), method, lease)
    assert states(plan, SpanKind.HISTORY) == [state]
    assert (note is None and not plan.notes) or any(note in one for one in plan.notes)
    assert plan.lost_blocks == ((0,) if note and state is SpanState.COMPUTED else ())


def test_a_plan_reads_only_what_it_uses() -> None:
    for method in (FUSED, EXACT_ONLY, NOTHING):
        plan = planned(prompt_of(A, B), method, stored(A), stored(B))
        for span in plan.spans:
            assert (span.lease is None) == (span.state is SpanState.COMPUTED)
