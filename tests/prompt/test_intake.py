"""Text among the chunks is part of the prompt; it is always computed and never stored."""

import pytest

from ragkv import Engine, PromptConfig, Text
from ragkv.config import SchedulerConfig
from ragkv.errors import DeadlineError, InputError
from ragkv.types import Excerpt
from tests.engine.helpers import (
    A,
    B,
    Q,
    close,
    counts,
    engine_of,
    full_prefill,
    stored,
    text_engine,
)

HEAD = Text((1, 40, 41), opening=True)
SEPARATOR = Text((50, 51))


def test_text_among_chunks_stays_in_its_place_and_is_computed(engine: Engine) -> None:
    engine.entries.encode([A, B])
    prefill = engine.prefill(Q, [A, SEPARATOR, B], ratio=0.0)
    assert prefill.token_ids.tolist() == [1, *A, *SEPARATOR.token_ids, *B, *Q]
    assert counts(prefill.reuse) == (1 + len(A), len(B), 0, len(SEPARATOR) + len(Q))
    assert prefill.reuse.missed_chunks == 0


def test_only_chunks_of_a_prompt_have_an_index_and_stored_kv(engine: Engine) -> None:
    prefill = engine.prefill(Q, [HEAD, A, SEPARATOR, B], ratio=0.0)
    indices = [span.chunk for span in prefill.spans]
    assert [index for index in indices if index is not None] == [0, 1]
    for work in (engine.entries.encode, engine.entries.delete, engine.entries.keys):
        with pytest.raises(InputError, match="A Text has no stored KV"):
            work([A, SEPARATOR])  # type: ignore[list-item, operator]
    assert engine.entries.keys([A]) != []


def test_the_separator_is_the_settings_unless_the_request_gives_another() -> None:
    """A chunk's ids are those of its text alone, so it has one entry whatever stands around it."""
    with text_engine() as engine:
        engine.entries.encode(["ab", "cd"])
        heading = Text((), "## ")
        for how, wanted in [
            ({}, "ab\n\ncd\n\nWhy?"),
            ({"separator": ""}, "abcdWhy?"),
            ({"separator": "; "}, "ab; cd; Why?"),
            ({"separator": engine.token_ids("; ")}, "ab; cd; Why?"),
        ]:
            prefill = engine.prefill("Why?", ["ab", "cd"], **how)
            assert prefill.token_ids.tolist() == [1, *engine.token_ids(wanted)]
            exact, fused, recomputed, computed = counts(prefill.reuse)
            # "ab" leads the prompt, so its first tokens are computed in place
            assert (exact, fused + recomputed, computed) == (1, 2, len(wanted) - 2)
            assert (prefill.reuse.missed_chunks, prefill.reuse.tokens) == (0, 1 + len(wanted))
        headed = engine.prefill("Why?", [heading, "ab", heading, "cd"])
        assert headed.token_ids.tolist() == [
            1,
            *engine.token_ids("## ab## cd\n\nWhy?"),
        ]
        assert headed.reuse.missed_chunks == 0


def test_a_setting_gives_another_separator_and_ids_need_none() -> None:
    with text_engine(prompt=PromptConfig(separator="|")) as engine:
        assert engine.prefill("?", ["ab"]).token_ids.tolist() == [
            1,
            *engine.token_ids("ab|?"),
        ]
    with engine_of() as engine:
        assert engine.prefill(Q, [A, B]).token_ids.tolist() == [1, *A, *B, *Q]
        assert engine.prefill(Q, [A, B], separator=[7]).token_ids.tolist() == [1, *A, 7, *B, 7, *Q]
        with pytest.raises(InputError, match="no tokenizer"):
            engine.prefill(Q, [A], separator="|")


@pytest.mark.parametrize("ratio", [0.0, 1.0])
def test_a_prompt_may_open_with_its_own_text(engine: Engine, ratio: float) -> None:
    """The entries were encoded behind another opening, so none of them is exact here."""
    engine.entries.encode([A, B])
    prefill = engine.prefill(Q, [HEAD, A, B], ratio=ratio, selector="first-k")
    assert prefill.token_ids.tolist() == [*HEAD.token_ids, *A, *B, *Q]
    exact, fused, recomputed, computed = counts(prefill.reuse)
    assert (exact, fused + recomputed, computed) == (0, len(A) + len(B), len(HEAD) + len(Q))
    if ratio == 1.0:
        close(prefill.logits, full_prefill(prefill.token_ids.tolist())[0])


def test_an_opening_equal_to_the_prefix_is_reused(engine: Engine) -> None:
    engine.entries.encode([A])
    assert engine.prefill(Q, [Text((1,), opening=True), A]).reuse == engine.prefill(Q, [A]).reuse


def test_a_part_of_a_stored_chunk_is_reused_and_exact_if_it_begins_right_behind_the_prefix(
    engine: Engine,
) -> None:
    engine.entries.encode([A, B])
    first = Excerpt(tuple(A[:-1]), whole=tuple(A))
    second = Excerpt(tuple(B[1:]), whole=tuple(B), offset=1)
    alone = engine.prefill(Q, [first])
    assert counts(alone.reuse) == (1 + len(first), 0, 0, len(Q))
    close(alone.logits, full_prefill(alone.token_ids.tolist())[0])
    both = engine.prefill(Q, [first, SEPARATOR, second], ratio=0.0)
    assert both.token_ids.tolist() == [1, *A[:-1], *SEPARATOR.token_ids, *B[1:], *Q]
    assert counts(both.reuse) == (1 + len(first), len(second), 0, len(SEPARATOR) + len(Q))
    whole = engine.prefill(Q, [first, SEPARATOR, second], ratio=1.0)
    close(whole.logits, full_prefill(whole.token_ids.tolist())[0])
    engine.flush()
    assert stored(engine, first.token_ids) is None and stored(engine, second.token_ids) is None


def test_a_later_part_of_a_stored_chunk_right_behind_the_prefix_is_fused(engine: Engine) -> None:
    """Computed again it equals a full prefill: its stored KV saw a token that is not here."""
    engine.entries.encode([A])
    part = Excerpt(tuple(A[1:]), whole=tuple(A), offset=1)
    assert engine.prefill(Q, [part], ratio=0.0).reuse.exact == 1
    whole = engine.prefill(Q, [part], ratio=1.0)
    close(whole.logits, full_prefill(whole.token_ids.tolist())[0])


def test_text_is_never_stored(engine: Engine) -> None:
    engine.prefill(Q, [HEAD, A, SEPARATOR, B])
    engine.flush()
    assert stored(engine, SEPARATOR.token_ids) is None
    assert stored(engine, HEAD.token_ids) is None
    assert stored(engine, A) is not None


def test_a_session_reuses_its_history_behind_the_same_opening(engine: Engine) -> None:
    session = engine.session("s")
    first = engine.answer(Q, [HEAD, A], session, max_new_tokens=2, min_new_tokens=2)
    second = engine.prefill([9], [HEAD, B], session, ratio=1.0)
    assert second.token_ids.tolist() == [*HEAD.token_ids, *A, *Q, *first.token_ids, *B, 9]
    close(second.logits, full_prefill(second.token_ids.tolist())[0])


def test_a_request_without_a_deadline_has_that_of_the_config() -> None:
    with engine_of(scheduler=SchedulerConfig(deadline_s=1e-9)) as engine:
        with pytest.raises(DeadlineError, match="1e-09"):
            engine.prefill(Q, [A])
        assert engine.prefill(Q, [A], deadline_s=60.0).reuse.tokens
