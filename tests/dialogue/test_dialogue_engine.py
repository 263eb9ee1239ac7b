"""Documents are inserted before the last user turn; clearing conversations covers saved turns and turns in progress."""

from collections.abc import Iterator

import pytest

from ragkv.api.chat import DialogueDocument, DialogueEngine, DialoguePrompt, DialogueRequest, Turn, insert_documents
from ragkv.types import Answer
from tests.engine.helpers import text_engine

CHATML = (
    "{%- for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TURNS = (Turn("user", "What stands in the text?"),)
ONE, TWO = DialogueDocument("First text.", {}), DialogueDocument("Second text.", {})


@pytest.fixture
def dialogue() -> Iterator[DialogueEngine]:
    with text_engine(CHATML) as engine:
        yield DialogueEngine(engine)


def ask(dialogue: DialogueEngine, *turns: Turn) -> tuple[DialoguePrompt, Answer]:
    """The prompt and the answer of a turn that is not saved yet."""
    prompt = dialogue.build_prompt(DialogueRequest(turns, ()))
    assert prompt.conversation is not None
    session = prompt.conversation.session
    return prompt, dialogue.engine.answer(prompt.question, prompt.chunks, session, max_new_tokens=4)


def earlier_turns(dialogue: DialogueEngine, *turns: Turn) -> int:
    prompt = dialogue.build_prompt(DialogueRequest(turns, ()))
    dialogue.drop_turn(prompt)
    assert prompt.conversation is not None
    return prompt.conversation.turns


def test_documents_are_inserted_before_the_text_of_the_last_user_turn() -> None:
    turns = (Turn("user", "Old"), Turn("assistant", "Yes"), Turn("user", "New"), Turn("assistant", "Well"))
    inserted = insert_documents(turns, (ONE, TWO), " ")
    assert inserted == (*turns[:2], Turn("user", "First text. Second text. New"), turns[3])


def test_without_a_user_turn_documents_become_one() -> None:
    inserted = insert_documents((Turn("system", "Be kind."),), (ONE,), " ")
    assert inserted == (Turn("system", "Be kind."), Turn("user", "First text. "))


def test_a_document_whose_text_is_in_a_turn_is_not_inserted() -> None:
    turns = (Turn("user", "It says: First text."),)
    assert insert_documents(turns, (ONE,), " ") == insert_documents(turns, (), " ") == turns


def test_forgotten_texts_and_conversations_are_not_found_again(dialogue: DialogueEngine) -> None:
    prompt, answer = ask(dialogue, *TURNS)
    dialogue.save_turn(prompt, answer)
    longer = (*TURNS, Turn("assistant", answer.text), Turn("user", "And now?"))
    assert earlier_turns(dialogue, *longer) == 1
    dialogue.catalogue.remember([DialogueDocument("A text that came with a request.", {})])
    dialogue.forget_requests()
    dialogue.engine.flush()
    assert dialogue.engine.conversations.ids() == ()
    assert dialogue.catalogue.find("A text that came with a request.") == []
    assert earlier_turns(dialogue, *longer) == 0


def test_a_turn_in_progress_when_all_is_forgotten_is_not_saved(dialogue: DialogueEngine) -> None:
    prompt, answer = ask(dialogue, *TURNS)
    dialogue.forget_requests()
    dialogue.save_turn(prompt, answer)
    dialogue.engine.flush()
    assert dialogue.engine.conversations.ids() == ()
    assert earlier_turns(dialogue, *TURNS, Turn("assistant", answer.text), Turn("user", "And now?")) == 0
