"""What a fused turn leaves in a history: kept, repaired for the next question, or computed."""

from pathlib import Path

import pytest

from ragkv import Engine, EngineConfig, Session, StoreConfig
from ragkv.config import SessionConfig
from ragkv.prompt.history import exact_blocks
from tests import tiny_models
from tests.engine.helpers import A, B, C
from tests.fixed import fixed

from .helpers import BLOCK, engine_at, is_full_prefill, question, with_kv

FOUR = {"max_new_tokens": 4, "min_new_tokens": 4}


def fused_turn(engine: Engine) -> Session:
    """A conversation whose only turn fused all chunks but the first."""
    engine.entries.encode([A, B, C])
    session = engine.session("s")
    engine.answer(question(1), [A, B, C], session, ratio=0.3, **FOUR)
    return session


def inexact(engine: Engine, session: Session) -> int:
    """How many tokens of the history are in blocks that are not exact."""
    history = session.state.history
    prefix = engine.parts.intake.runs.before_documents
    rope_digest = engine.model.adapter.rope.digest(len(prefix) + len(history))
    known = zip(history.blocks, exact_blocks(prefix, history.blocks, rope_digest), strict=True)
    return sum(len(block) for block, exact in known if not exact)


def test_what_is_exact_of_a_fused_turn_has_blocks_of_its_own(engine: Engine) -> None:
    session = fused_turn(engine)
    assert len(A) % BLOCK  # so that a block would hold tokens of two chunks
    assert inexact(engine, session) == with_kv(session) - len(A)


class TestSelect:
    def test_inexact_tokens_are_candidates_of_the_next_question(self, tmp_path: Path) -> None:
        with engine_at(tmp_path, session={"inexact_history": "select"}) as engine:
            session = fused_turn(engine)
            count = inexact(engine, session)
            prefill = engine.prefill(question(2), session=session, ratio=0.3)
            assert prefill.reuse.recomputed == -(-count * 3 // 10)
            assert prefill.reuse.fused == count - prefill.reuse.recomputed
            assert prefill.reuse.exact == 1 + len(A)
            note = (
                f"{prefill.reuse.recomputed} of {count} history tokens that are not exact "
                "were recomputed"
            )
            assert prefill.reuse.notes == (f"{note} for this question",)
            assert (
                sum(span.recomputed for span in prefill.spans if span.kind == "history")
                == prefill.reuse.recomputed
            )

    @pytest.mark.parametrize("family", tiny_models.FAMILIES)
    def test_recomputing_every_inexact_token_equals_a_full_prefill(
        self, tmp_path: Path, family: str
    ) -> None:
        with engine_at(tmp_path, family, session={"inexact_history": "select"}) as engine:
            session = fused_turn(engine)
            prefill = is_full_prefill(engine, session, 2, family, ratio=0.999)
            assert prefill.reuse.fused == 0

    @pytest.mark.parametrize("selector", ["attention", "first-k"])
    def test_only_what_a_turn_fused_is_recomputed_and_noted_three_turns_later(
        self, tmp_path: Path, selector: str
    ) -> None:
        with engine_at(tmp_path) as engine:
            left = inexact(engine, fused_turn(engine))
        for _ in ("after a restart", "after another one"):
            with engine_at(tmp_path) as engine:
                session = engine.session("s")
                for turn in (2, 3, 4):
                    reuse = engine.answer(
                        question(turn), session=session, ratio=0.3, selector=selector, **FOUR
                    ).reuse
                    note = (
                        f"{reuse.recomputed} of {left} history tokens that are not exact were "
                        "recomputed"
                    )
                    assert reuse.notes == (f"{note} for this question",)
                    assert reuse.recomputed == -(-left * 3 // 10)

    @pytest.mark.parametrize("selector", ["attention", "first-k", "hkvd"])
    @pytest.mark.parametrize("codec", ["raw", "int8"])
    def test_a_chat_without_documents_recomputes_no_history(
        self, selector: str, codec: str
    ) -> None:
        config = EngineConfig(
            store=StoreConfig(codec=codec),
            fusion=fixed(selector=selector),
            session=SessionConfig(block_tokens=BLOCK),
        )
        with Engine(tiny_models.model("llama"), config=config) as engine:
            session = engine.session("s")
            for turn in range(6):
                reuse = engine.answer(question(turn), session=session, **FOUR).reuse
                assert (reuse.recomputed, reuse.notes) == (0, ())
                if turn == 2:
                    session.discard([(0, 9)])
