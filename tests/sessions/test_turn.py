"""Every turn equals a full prefill of the conversation and costs its new tokens: across turns,
restarts, families.
"""

from pathlib import Path

import pytest

from ragkv import Engine, PromptConfig, Text
from ragkv.prompt.template import TemplateRuns
from tests import tiny_models
from tests.engine.helpers import A, B, C, close, full_prefill, text_engine
from tests.prompt.test_template import CHATML

from .helpers import ask, carry_on, engine_at, files, is_full_prefill, question, talk, with_kv

TAIL = 1  # the last token of an answer has no KV yet


@pytest.mark.parametrize("family", tiny_models.FAMILIES)
def test_every_turn_equals_a_full_prefill_across_a_restart(tmp_path: Path, family: str) -> None:
    carry_on(tmp_path, family, turns=4, restarts={2})


@pytest.mark.parametrize("restart", [1, 2, 6, 11])
def test_a_restart_between_any_two_turns_costs_no_exact_token(tmp_path: Path, restart: int) -> None:
    prefills = carry_on(tmp_path, "llama", turns=12, restarts={restart})
    for turn, prefill in enumerate(prefills):
        history = 9 * turn
        assert prefill.reuse.exact == 1 + max(0, history - TAIL)
        assert prefill.reuse.computed == 5 + (TAIL if turn else 0)
        assert prefill.reuse.notes == ()
    assert ("disk" in prefills[restart].reuse.bytes_by_tier) and "disk" not in prefills[
        restart - 1
    ].reuse.bytes_by_tier


@pytest.mark.parametrize("family", tiny_models.LENGTH_DEPENDENT)
def test_history_with_other_rope_frequencies_is_recomputed_and_the_report_says_so(
    tmp_path: Path, family: str
) -> None:
    prefills = carry_on(tmp_path, family, turns=9, restarts={3, 7})
    changed = [
        any("RoPE frequencies changed" in note for note in prefill.reuse.notes)
        for prefill in prefills
    ]
    short = [prefill.token_ids.numel() <= tiny_models.ORIGINAL_LENGTH for prefill in prefills]
    assert not any(said and fits for said, fits in zip(changed, short, strict=True))
    first = short.index(False)
    assert changed[first]
    assert prefills[first].reuse.exact <= 1
    if family == "phi3":  # two sets of frequencies: after the change, history is exact again
        assert not any(changed[first + 1 :])
        assert prefills[-1].reuse.exact > prefills[-1].reuse.computed
    else:  # every length has its own frequencies: no later turn can use the KV
        assert all(changed[first:])


@pytest.mark.parametrize("family", tiny_models.LENGTH_DEPENDENT)
def test_kv_that_no_longer_prompt_can_use_is_not_stored(tmp_path: Path, family: str) -> None:
    """The answer during which the frequencies change, and the question before it, get no blocks."""
    with engine_at(tmp_path, family) as engine:
        session = talk(engine, turns=5)
        blocks = session.state.history.blocks
        answer = engine.answer([5], session=session, max_new_tokens=6, min_new_tokens=6)
        assert answer.reuse.tokens == tiny_models.ORIGINAL_LENGTH - 1
        engine.flush()
        assert session.state.history.blocks == blocks
        assert files(tmp_path) == len(blocks)


def test_history_alone_adds_no_deviation_at_any_ratio(engine: Engine) -> None:
    session = talk(engine, turns=4)
    for how in (dict(ratio=0.0), dict(ratio=0.5), dict(reuse="prefix"), dict(reuse="none")):
        reuse = is_full_prefill(engine, session, 4, **how).reuse
        assert reuse.exact == (0 if how.get("reuse") == "none" else 1 + with_kv(session))


class TestTurnsWithFusedChunks:
    def test_fused_history_is_reused_below_ratio_one_and_computed_at_ratio_one(
        self, tmp_path: Path
    ) -> None:
        with engine_at(tmp_path, session={"inexact_history": "keep"}) as engine:
            engine.entries.encode([A, B, C])
            session = talk(engine, turns=1)
            ask(engine, session, 1, [A, B], ratio=0.3)
            # the tail is in front of what was fused
            exact = 1 + 8 + TAIL
            kept = with_kv(session) - 8 - TAIL
            reuse = engine.prefill(question(2), session=session, ratio=0.3).reuse
            assert (reuse.exact, reuse.fused, reuse.computed) == (exact, kept, 1 + 5)
            whole = is_full_prefill(engine, session, 2, ratio=1.0).reuse
            assert (whole.exact, whole.fused) == (exact, 0)
            assert whole.notes == (f"{kept} history tokens recomputed: it was not exact",)
            is_full_prefill(engine, session, 2, reuse="prefix")

    @pytest.mark.parametrize(("setting", "ratio"), [("select", 1.0), ("recompute", 0.3)])
    def test_fused_history_is_computed_once_at_ratio_one_or_by_setting(
        self, tmp_path: Path, setting: str, ratio: float
    ) -> None:
        with engine_at(tmp_path, session={"inexact_history": setting}) as engine:
            engine.entries.encode([A, B])
            session = talk(engine, turns=1)
            ask(engine, session, 1, [A, B], ratio=0.3)
            second = is_full_prefill(engine, session, 2, ratio=ratio).reuse
            assert second.fused == 0 and any("it was not exact" in note for note in second.notes)
            ask(engine, session, 2, ratio=ratio)
            third = is_full_prefill(engine, session, 3, ratio=0.3).reuse
            assert (third.exact, third.fused, third.notes) == (1 + with_kv(session), 0, ())

    def test_inexact_history_serves_no_other_session(self, engine: Engine) -> None:
        """Two equal conversations, one of them with fused chunks: the exact one finds only exact
        blocks.
        """
        engine.entries.encode([A, B])
        sloppy = engine.session("sloppy")
        exact = engine.session("exact")
        answer = list(tiny_models.tokens(4, seed=9))
        for session, ratio in ((sloppy, 0.0), (exact, 1.0)):
            engine.append(session, question(0), answer, ratio=ratio)
            engine.append(session, question(1), answer, [A, B], ratio=ratio)
        assert sloppy.token_ids == exact.token_ids
        assert is_full_prefill(engine, exact, 2, ratio=0.0).reuse.fused == 0
        assert engine.prefill(question(2), session=sloppy, ratio=0.0).reuse.fused > 0
        first, second = (
            {block.key(engine.entries.encoder.identity) for block in session.state.history.blocks}
            for session in (sloppy, exact)
        )
        # the blocks of the first turn: the same KV, so the same entries
        assert len(first & second) == 2


def test_equal_conversations_share_their_blocks(engine: Engine) -> None:
    one = talk(engine, "1")
    two = talk(engine, "2")
    engine.flush()
    assert engine.stats().store.tiers[-1].entries == len(one.state.history.blocks)
    one.delete()
    assert is_full_prefill(engine, two, 3).reuse.exact == 1 + with_kv(two)
    two.delete()
    assert engine.stats().store.tiers[-1].entries == 0


def test_an_appended_turn_equals_a_decoded_turn(engine: Engine) -> None:
    said = engine.session("said")
    given = engine.session("given")
    for turn in range(3):
        answer = ask(engine, said, turn)
        prefill = engine.append(given, question(turn), answer.token_ids)
        assert given.token_ids == said.token_ids
        close(prefill.logits, full_prefill([1, *given.token_ids])[0])
    # every token has KV
    assert is_full_prefill(engine, given, 3).reuse.exact == 1 + len(given.token_ids)


def test_the_templates_tokens_between_turns_are_computed_by_the_next_turn() -> None:
    with text_engine(CHATML, prompt=PromptConfig(system="Be brief.")) as engine:
        session = engine.session("s")
        first = engine.answer("Why?", session=session, max_new_tokens=4, min_new_tokens=4)
        runs: TemplateRuns = engine.parts.intake.runs
        reuse = engine.prefill("And?", session=session).reuse
        between = len(runs.after_answer) + len(runs.before_next_turn)
        assert between > 0
        question_tokens = len(engine.chunk("Why?")) + len(runs.after_question)
        assert reuse.computed == 1 + between + len(engine.chunk("And?")) + len(runs.after_question)
        assert (
            reuse.exact == len(runs.before_documents) + question_tokens + len(first.token_ids) - 1
        )


def test_parts_say_the_kind_of_every_token_of_a_history(engine: Engine) -> None:
    session = engine.session("s")
    chunks = [engine.chunk(A), Text(tuple(C), "between"), engine.chunk(B)]
    ask(engine, session, 0, chunks)
    ask(engine, session, 1)
    parts = [(part.kind.value, len(part), part.turn) for part in session.state.history.parts]
    assert parts == [
        ("chunk", len(A), 0),
        ("chunk", len(C), 0),
        ("chunk", len(B), 0),
        ("question", 5, 0),
        ("answer", 4, 0),
        ("question", 5, 1),
        ("answer", 4, 1),
    ]
    assert sum(len(part) for part in session.state.history.parts) == len(session.token_ids)
