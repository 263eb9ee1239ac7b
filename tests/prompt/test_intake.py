"""Text among the chunks is part of the prompt; it is always computed and never stored."""

import pytest

from ragkv import Text
from tests.engine.helpers import A, B, Q, close, counts, engine_of, full_prefill, stored

HEAD, SEPARATOR = Text((1, 40, 41), opening=True), Text((50, 51))


def test_text_among_chunks_stays_in_its_place_and_is_computed() -> None:
    with engine_of() as engine:
        engine.warm([A, B])
        prefill = engine.prefill(Q, [A, SEPARATOR, B], ratio=0.0)
        assert prefill.token_ids.tolist() == [1, *A, *SEPARATOR.token_ids, *B, *Q]
        assert counts(prefill.reuse) == (1 + len(A), len(B), 0, len(SEPARATOR) + len(Q))
        assert prefill.reuse.missed_chunks == 0


@pytest.mark.parametrize("ratio", [0.0, 1.0])
def test_a_prompt_may_open_with_its_own_text(ratio: float) -> None:
    """The entries were encoded behind another opening, so none of them is exact here."""
    with engine_of() as engine:
        engine.warm([A, B])
        prefill = engine.prefill(Q, [HEAD, A, B], ratio=ratio, selector="first-k")
        assert prefill.token_ids.tolist() == [*HEAD.token_ids, *A, *B, *Q]
        exact, fused, recomputed, computed = counts(prefill.reuse)
        assert (exact, fused + recomputed, computed) == (0, len(A) + len(B), len(HEAD) + len(Q))
        if ratio == 1.0:
            close(prefill.logits, full_prefill(prefill.token_ids.tolist())[0])


def test_an_opening_equal_to_the_prefix_is_reused() -> None:
    with engine_of() as engine:
        engine.warm([A])
        assert engine.prefill(Q, [Text((1,), opening=True), A]).reuse == engine.prefill(Q, [A]).reuse


def test_text_is_never_stored() -> None:
    with engine_of() as engine:
        engine.prefill(Q, [HEAD, A, SEPARATOR, B])
        engine.flush()
        assert stored(engine, SEPARATOR.token_ids) is None
        assert stored(engine, HEAD.token_ids) is None
        assert stored(engine, A) is not None


def test_a_session_reuses_its_history_behind_the_same_opening() -> None:
    with engine_of() as engine:
        session = engine.session("s")
        first = engine.answer(Q, [HEAD, A], session, max_new_tokens=2, min_new_tokens=2)
        second = engine.prefill([9], [HEAD, B], session, ratio=1.0)
        assert second.token_ids.tolist() == [*HEAD.token_ids, *A, *Q, *first.token_ids, *B, 9]
        close(second.logits, full_prefill(second.token_ids.tolist())[0])
