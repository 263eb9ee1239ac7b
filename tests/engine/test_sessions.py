"""A conversation: history stands before new chunks, and every turn is a full prefill of the same
ids.
"""

import pytest

from ragkv import Engine, PromptConfig
from tests.prompt.test_template import CHATML, HEADERS

from .helpers import A, B, Q, text_engine


def text_ids(engine: Engine, text: str) -> list[int]:
    return engine.tokenizer(text, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize(("ratio", "recomputed"), [(0.0, 0), (0.4, 7), (1.0, 16)])
def test_history_is_exact_and_chunks_behind_it_are_fused(
    engine: Engine, ratio: float, recomputed: int
) -> None:
    engine.entries.encode([A, B])
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
        for content in ("ab\n\nc\n\nWhy?", "ab\n\nc\n\nAnd?"):
            messages += [
                {"role": "user", "content": content},
                {"role": "assistant", "content": blank},
            ]
        messages.append({"role": "user", "content": "d\n\nOh?"})
        rendered = engine.tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )
        parts = [text_ids(engine, part) for part in rendered.split(blank)]
        assert prefill.token_ids.tolist() == [*parts[0], *said[0], *parts[1], *said[1], *parts[2]]
