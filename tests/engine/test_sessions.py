"""A conversation: history stands before new chunks, and every turn is a full prefill of the same ids."""

import pytest
import torch

from ragkv import Engine, PromptConfig
from ragkv.errors import PromptTooLongError
from tests.prompt.test_layout import CHATML, HEADERS
from tests.toy_tokenizers import BOS

from .helpers import A, B, C, Q, engine_of, text_engine


def text_ids(engine: Engine, text: str) -> list[int]:
    return engine.tokenizer(text, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize(("ratio", "recomputed"), [(0.0, 0), (0.4, 7), (1.0, 16)])
def test_history_is_exact_and_chunks_behind_it_are_fused(ratio: float, recomputed: int) -> None:
    with engine_of() as engine:
        engine.warm([A, B])
        session = engine.session("s")
        engine.answer(Q, [A], session, max_new_tokens=3, min_new_tokens=3)
        history = len(session.token_ids)
        reuse = engine.prefill([9, 8], [A, B], session, ratio=ratio, selector="first-k").reuse
        last = 1  # the answer's last token: nothing followed it, so it has no KV yet
        assert (reuse.exact, reuse.computed, reuse.recomputed) == (history, last + 2, recomputed)
        assert reuse.fused == len(A) + len(B) - recomputed


@pytest.mark.parametrize("template", [CHATML, HEADERS], ids=["chatml", "headers"])
def test_a_conversation_has_the_ids_that_its_chat_template_writes(template: str) -> None:
    with text_engine(template, prompt=PromptConfig(system="Be brief.")) as engine:
        session = engine.session("s")
        said = []
        for turn in ("Why?", "And?"):
            answer = engine.answer(turn, ["ab", "c"], session, max_new_tokens=4, min_new_tokens=4)
            said.append(list(answer.token_ids))
        prefill = engine.prefill("Oh?", ["d"], session)
        blank = "~"  # stands for answers, which need not be text
        messages = [{"role": "system", "content": "Be brief."}]
        for content in ("abcWhy?", "abcAnd?"):
            messages += [{"role": "user", "content": content}, {"role": "assistant", "content": blank}]
        messages.append({"role": "user", "content": "dOh?"})
        rendered = engine.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        parts = [text_ids(engine, part) for part in rendered.split(blank)]
        assert prefill.token_ids.tolist() == [*parts[0], *said[0], *parts[1], *said[1], *parts[2]]


def test_turns_follow_each_other_directly_without_a_template() -> None:
    with text_engine(prompt=PromptConfig(system="S")) as engine:
        session = engine.session("s")
        answer = engine.answer("q", ["ab"], session, max_new_tokens=2, min_new_tokens=2)
        prefill = engine.prefill("r", ["c"], session)
        wanted = [BOS, *text_ids(engine, "Sabq"), *answer.token_ids, *text_ids(engine, "cr")]
        assert prefill.token_ids.tolist() == wanted


def test_a_turn_that_fails_leaves_the_session_as_it_was() -> None:
    with engine_of() as engine:
        session = engine.session("s")
        engine.answer(Q, [A], session, max_new_tokens=2)
        before = session.token_ids
        with pytest.raises(PromptTooLongError):
            engine.answer([5] * 500, [A], session)
        assert (session.token_ids, session.turns) == (before, 1)
        assert not session.lock.locked()


def test_a_prefill_reads_a_session_and_does_not_change_it() -> None:
    with engine_of() as engine:
        session = engine.session("s")
        engine.answer(Q, [A], session, max_new_tokens=2)
        before = session.token_ids
        first = engine.prefill(Q, [C], session)
        assert torch.equal(engine.prefill(Q, [C], session).logits, first.logits)
        assert session.token_ids == before
