"""Documents are inserted before the last user turn; clearing conversations covers saved turns and turns in progress."""

from collections.abc import Iterator

import pytest

from ragkv.api.chat import ChatDocument, ChatEngine, ChatInput, ChatPrompt, PlainMessage, insert_documents
from ragkv.types import Answer
from tests.engine.helpers import text_engine

CHATML = (
    "{%- for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TURNS = (PlainMessage("user", "What stands in the text?"),)
ONE, TWO = ChatDocument("First text.", {}), ChatDocument("Second text.", {})


@pytest.fixture
def chat() -> Iterator[ChatEngine]:
    with text_engine(CHATML) as engine:
        yield ChatEngine(engine)


def ask(chat: ChatEngine, *turns: PlainMessage) -> tuple[ChatPrompt, Answer]:
    """The prompt and the answer of a turn that is not saved yet."""
    prompt = chat.build_prompt(ChatInput(turns, ()))
    assert prompt.conversation is not None
    session = prompt.conversation.session
    return prompt, chat.engine.answer(prompt.question, prompt.chunks, session, max_new_tokens=4)


def earlier_turns(chat: ChatEngine, *turns: PlainMessage) -> int:
    prompt = chat.build_prompt(ChatInput(turns, ()))
    chat.drop_turn(prompt)
    assert prompt.conversation is not None
    return prompt.conversation.turns


def test_documents_are_inserted_before_the_text_of_the_last_user_turn() -> None:
    turns = (
        PlainMessage("user", "Old"),
        PlainMessage("assistant", "Yes"),
        PlainMessage("user", "New"),
        PlainMessage("assistant", "Well"),
    )
    inserted = insert_documents(turns, (ONE, TWO), " ")
    assert inserted == (*turns[:2], PlainMessage("user", "First text. Second text. New"), turns[3])


def test_forgotten_texts_and_conversations_are_not_found_again(chat: ChatEngine) -> None:
    prompt, answer = ask(chat, *TURNS)
    chat.save_turn(prompt, answer)
    longer = (*TURNS, PlainMessage("assistant", answer.text), PlainMessage("user", "And now?"))
    assert earlier_turns(chat, *longer) == 1
    chat.catalogue.remember([ChatDocument("A text that came with a request.", {})])
    chat.forget_requests()
    chat.engine.flush()
    assert chat.engine.conversations.ids() == ()
    assert chat.catalogue.find("A text that came with a request.") == []
    assert earlier_turns(chat, *longer) == 0


def test_a_turn_in_progress_when_all_is_forgotten_is_not_saved(chat: ChatEngine) -> None:
    prompt, answer = ask(chat, *TURNS)
    chat.forget_requests()
    chat.save_turn(prompt, answer)
    chat.engine.flush()
    assert chat.engine.conversations.ids() == ()
    assert earlier_turns(chat, *TURNS, PlainMessage("assistant", answer.text), PlainMessage("user", "And now?")) == 0
