"""Documents are placed before the last user turn; forgetting ends what is filed and what is under way."""

from collections.abc import Iterator

import pytest

from ragkv import Engine
from ragkv.dialogue import Dialogues, Given, Request, Turn, file_answer, lay_out, placed
from tests.engine.helpers import text_engine

CHATML = (
    "{%- for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TURNS = (Turn("user", "What stands in the text?"),)


@pytest.fixture
def engine() -> Iterator[Engine]:
    with text_engine(CHATML) as engine:
        yield engine


def say(dialogues: Dialogues, turns: tuple[Turn, ...]) -> tuple[str, bool]:
    """The answer, and whether the conversation was known."""
    asked = lay_out(dialogues, Request(turns, ()), converse=True)
    assert asked.conversation is not None
    known = asked.conversation.turns > 0
    answer = dialogues.engine.answer(asked.question, asked.chunks, asked.conversation.session, max_new_tokens=4)
    file_answer(dialogues, asked, answer.text)
    return answer.text, known


def test_documents_stand_before_what_the_last_user_turn_says() -> None:
    one, two = Given("First text.", {}), Given("Second text.", {})
    turns = (Turn("user", "Old"), Turn("assistant", "Yes"), Turn("user", "New"), Turn("assistant", "Well"))
    found = placed(turns, (one, two), " ")
    assert found[2].text == "First text. Second text. New" and found[:2] == turns[:2] and found[3] == turns[3]
    assert placed((Turn("user", "It says: First text."),), (one,), " ")[0].text == "It says: First text."
    assert placed((Turn("system", "Be kind."),), (one,), " ")[-1] == Turn("user", "First text. ")
    assert placed(turns, (), " ") == turns


def test_what_is_forgotten_is_not_found_again(engine: Engine) -> None:
    dialogues = Dialogues(engine)
    answer, _ = say(dialogues, TURNS)
    going_on = (*TURNS, Turn("assistant", answer), Turn("user", "And now?"))
    assert say(dialogues, going_on)[1]
    dialogues.catalogue.give([Given("A text that came with a call.", {})])
    dialogues.forget()
    engine.flush()
    assert engine.session_ids() == () and dialogues.catalogue.find("A text that came with a call.") == []
    assert not say(dialogues, going_on)[1]


def test_a_turn_under_way_when_all_is_forgotten_is_not_filed(engine: Engine) -> None:
    dialogues = Dialogues(engine)
    asked = lay_out(dialogues, Request(TURNS, ()), converse=True)
    assert asked.conversation is not None
    answer = engine.answer(asked.question, asked.chunks, asked.conversation.session, max_new_tokens=4)
    dialogues.forget()
    file_answer(dialogues, asked, answer.text)
    engine.flush()
    assert engine.session_ids() == () and len(dialogues.conversations) == 0
