"""What a fused turn leaves in a history: kept, repaired for the next question, or computed."""

from pathlib import Path
from typing import Any

import pytest
import torch

from ragkv import Engine, EngineConfig, FusionConfig, Session, StoreConfig
from ragkv.config import SessionConfig
from ragkv.prompt.history import exact_blocks
from tests import tiny_models
from tests.engine.helpers import A, B, C, active_request

from .helpers import BLOCK, engine_at, is_full_prefill, question, with_kv

FOUR = {"max_new_tokens": 4, "min_new_tokens": 4}


def fused_turn(engine: Engine) -> Session:
    """A conversation whose only turn fused all chunks but the first."""
    engine.warm([A, B, C])
    session = engine.session("s")
    engine.answer(question(1), [A, B, C], session, ratio=0.3, **FOUR)
    return session


def scored_at(directory: Path | None, **session: Any) -> Engine:
    config = EngineConfig(
        store=StoreConfig(directory=None if directory is None else str(directory)),
        fusion=FusionConfig(selector="sensitivity", sensitivity_prefixes=2),
        session=SessionConfig(block_tokens=BLOCK, **session),
    )
    return Engine(tiny_models.model("llama"), config=config)


def inexact(engine: Engine, session: Session) -> int:
    """How many tokens of the history are in blocks that are not exact."""
    history = session.state.history
    prefix = engine.intake.runs.before_documents
    frequencies = engine.model.adapter.rope.frequencies(len(prefix) + len(history))
    known = zip(history.blocks, exact_blocks(prefix, history.blocks, frequencies), strict=True)
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

    def test_history_keeps_the_scores_of_its_chunks_across_a_restart(self, tmp_path: Path) -> None:
        with scored_at(tmp_path, inexact_history="select") as engine:
            session = fused_turn(engine)
            recomputed = engine.prefill(question(1), [A, B, C], ratio=0.3).selected
            engine.flush()
            scorer = engine.entries.encoder.scorer
            writer = engine.conversations.block_writer
            assert scorer is not None
            own = [engine._backend._planner._scores.find(tuple(chunk)) for chunk in (B, C)]
            wanted = torch.zeros(1 + with_kv(session), scorer.columns, dtype=torch.float16)
            wanted[1 + len(A) : 1 + len(A) + len(B) + len(C)] = torch.cat(
                [found for found in own if found is not None]
            )
            wanted[recomputed, 0] = 0.0
            blocks = session.state.history.blocks
        with scored_at(tmp_path, inexact_history="select") as engine:
            session = engine.session("s")
            writer = engine.conversations.block_writer
            assert session.state.history.blocks == blocks
            at = 1
            for block in blocks:
                scores = writer.scores(block, scorer.name)
                if at < 1 + len(A):
                    assert scores is None  # it is exact
                else:
                    assert scores is not None and torch.equal(scores, wanted[at : at + len(block)])
                at += len(block)
            prefill = engine.prefill(question(2), session=session, ratio=0.3)
            chosen = prefill.selected
            assert len(chosen) and not set(chosen.tolist()) & set(recomputed.tolist())
            assert bool((wanted[chosen, 0] > 0).all())

    def test_history_without_scores_is_used_as_it_is_and_the_report_says_so(
        self, tmp_path: Path
    ) -> None:
        with scored_at(tmp_path, inexact_history="select") as engine:
            session = fused_turn(engine)
            engine.flush()
            engine.store.gc(lambda identity: not identity.scorer)
            reuse = engine.prefill(question(2), session=session, ratio=0.3).reuse
            assert reuse.recomputed == 0
            kept = (
                f"{reuse.fused} history tokens are not exact and were used as they are: they "
                "have no scores"
            )
            assert reuse.notes == (kept,) and reuse.selector == "sensitivity"

    @pytest.mark.parametrize("selector", ["sensitivity", "first-k"])
    def test_only_what_a_turn_fused_is_recomputed_and_noted_three_turns_later(
        self, tmp_path: Path, selector: str
    ) -> None:
        with scored_at(tmp_path) as engine:
            left = inexact(engine, fused_turn(engine))
        for _ in ("after a restart", "after another one"):
            with scored_at(tmp_path) as engine:
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

    @pytest.mark.parametrize("selector", ["sensitivity", "first-k", "hkvd"])
    @pytest.mark.parametrize("codec", ["raw", "int8"])
    def test_a_chat_without_documents_recomputes_no_history(
        self, selector: str, codec: str
    ) -> None:
        config = EngineConfig(
            store=StoreConfig(codec=codec),
            fusion=FusionConfig(selector=selector, sensitivity_prefixes=2),
            session=SessionConfig(block_tokens=BLOCK),
        )
        with Engine(tiny_models.model("llama"), config=config) as engine:
            session = engine.session("s")
            for turn in range(6):
                reuse = engine.answer(question(turn), session=session, **FOUR).reuse
                assert (reuse.recomputed, reuse.notes) == (0, ())
                if turn == 2:
                    session.discard([(0, 9)])

    def test_the_next_turn_prefetches_scores_only_of_what_a_turn_fused(
        self, tmp_path: Path
    ) -> None:
        with scored_at(tmp_path) as engine:
            session = fused_turn(engine)
            engine.answer(question(2), session=session, **FOUR)
            fused = [block.fused for block in session.state.history.blocks]
            hint = engine._backend._planner.prefetch_hint(
                active_request(engine, question(3), session=session)
            )
            assert [entry.with_scores for entry in hint.entries] == fused
            assert {True, False} == set(fused)

    def test_new_chunks_without_scores_leave_history_as_it_is(self, tmp_path: Path) -> None:
        with scored_at(tmp_path) as engine:
            session = fused_turn(engine)
            left = inexact(engine, session)
            engine.flush()
            scores = engine.entries.encoder.scores_identity
            engine.store.gc(lambda identity: identity != scores)
            prefill = engine.prefill(question(2), [B, C], session=session, ratio=0.3)
            assert prefill.reuse.selector == "attention"
            assert sum(span.recomputed for span in prefill.spans if span.kind == "history") == 0
            chunks = (
                len(B)
                + len(C)
                - sum(span.recomputed for span in prefill.spans if span.kind == "chunk")
            )
            assert prefill.reuse.fused == left + chunks
            assert not any("for this question" in note for note in prefill.reuse.notes)

    def test_scores_leave_the_store_with_their_conversation(self, tmp_path: Path) -> None:
        with scored_at(tmp_path, inexact_history="select") as engine:
            session = fused_turn(engine)
            engine.flush()
            chunks = {engine.entries.encoder.identity.key(tuple(chunk)) for chunk in (A, B, C)}
            scored = engine.store.refused(lambda identity: not identity.scorer)
            assert {key.kv for key in scored} - chunks
            session.delete()
            engine.delete([A, B, C])
            assert engine.store.refused(lambda _: False) == set()
