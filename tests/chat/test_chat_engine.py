"""Documents are inserted before the last user turn; clearing conversations covers saved turns and
turns in progress.
"""

import json
from collections.abc import Callable, Generator, Iterator, Sequence

import pytest

from ragkv import Engine
from ragkv.chat import (
    ChatAnswer,
    ChatDocument,
    ChatEngine,
    ChatInput,
    ChatPrompt,
    PlainMessage,
    insert_documents,
)
from ragkv.errors import DeadlineError, StoreError
from ragkv.types import Answer, Reuse, Timing, TokenEvent
from tests.engine.helpers import text_engine
from tests.reader import READER
from tests.toy_tokenizers import CHATML

TURNS = (PlainMessage("user", "What stands in the text?"),)
ONE = ChatDocument("First text.", {})
TWO = ChatDocument("Second text.", {})


@pytest.fixture
def chat() -> Iterator[ChatEngine]:
    with text_engine(CHATML) as engine:
        yield ChatEngine(engine)


def ask(chat: ChatEngine, *turns: PlainMessage) -> tuple[ChatPrompt, Answer]:
    """The prompt and the answer of a turn that is not saved yet."""
    prompt = chat.build_prompt(ChatInput(turns, ()))
    assert prompt.conversation is not None
    session = prompt.conversation.session
    return prompt, chat.engine.answer(prompt.question, prompt.pieces, session, max_new_tokens=4)


def earlier_turns(chat: ChatEngine, *turns: PlainMessage) -> int:
    prompt = chat.build_prompt(ChatInput(turns, ()))
    chat.delete_turn(prompt)
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


@pytest.mark.parametrize(
    ("document", "said", "is_there"),
    [
        ("art", "When did the department start?", False),
        ("art", "Which department teaches art?", True),
        ("Art", "Which department teaches art?", False),  # the model would not see that text
        ("\u6771\u4eac", "\u9996\u90fd\u306f\u6771\u4eac\u3067\u3059", True),
        ("...", "And then...", True),
        ("12", "In 1812", False),
    ],
)
def test_a_document_stands_in_a_message_that_has_its_text_as_whole_words(
    document: str, said: str, is_there: bool
) -> None:
    turns = (PlainMessage("user", said),)
    inserted = insert_documents(turns, (ChatDocument(document, {}),), " ")
    assert inserted == (turns if is_there else (PlainMessage("user", f"{document} {said}"),))


PASSAGES = (
    "The mill stands on the hill.",
    "Its wheel has not turned since the war!",
    "Oró has a harbour (old).",
)
TEMPLATES: dict[str, Callable[[Sequence[str]], str]] = {
    "plain": "\n\n".join,
    "numbered": lambda texts: "\n".join(
        f"{number}. {text}" for number, text in enumerate(texts, 1)
    ),
    "JSON": lambda texts: json.dumps([{"text": text} for text in texts], ensure_ascii=False),
    "indented": lambda texts: "".join(f"    {text}\n" for text in texts),
    "HTML": lambda texts: "<ul>" + "".join(f"<li>{text}</li>" for text in texts) + "</ul>",
    "bullets": lambda texts: "".join(f"- {text}\n" for text in texts),
    "quoted": lambda texts: "\n\n".join(f"> {text}" for text in texts),
    "titled": lambda texts: "".join(
        f"## Passage {number}\n{text}\n\n" for number, text in enumerate(texts, 1)
    ),
    "citations": lambda texts: " ".join(
        f"[{number}] {text} (source {number})" for number, text in enumerate(texts, 1)
    ),
    "one line": " ".join,
}


@pytest.fixture(scope="module", params=["reader", "merging"])
def reading(request: pytest.FixtureRequest) -> Iterator[ChatEngine]:
    """On the small reader, and on a tokenizer that merges a full stop with the line breaks behind
    it.
    """
    merges = [(".", "Ċ"), (".Ċ", "Ċ"), ("Ġ", "T")]
    with (
        Engine.from_pretrained(READER)
        if request.param == "reader"
        else text_engine(merges=merges) as engine
    ):
        chat = ChatEngine(engine)
        chat.catalogue.ingest(ChatDocument(text, {}) for text in PASSAGES)
        yield chat


@pytest.mark.parametrize("role", ["user", "system"])
@pytest.mark.parametrize("template", TEMPLATES)
def test_one_stored_chunk_serves_a_passage_in_every_template(
    reading: ChatEngine, template: str, role: str
) -> None:
    engine = reading.engine
    context = TEMPLATES[template](PASSAGES)
    turns = (PlainMessage("user", f"{context}\n\nWho?"),)
    if role == "system":
        turns = (PlainMessage("system", f"Answer from:\n{context}"), PlainMessage("user", "Who?"))
    prompt = reading.build_prompt(ChatInput(turns, ()), find_conversation=False)
    assert [chunk.text for chunk in prompt.documents] == list(PASSAGES)
    assert [chunk.token_ids for chunk in prompt.documents] == [
        engine.chunk(text).token_ids for text in PASSAGES
    ]
    reuse = engine.prefill(prompt.question, prompt.pieces, separator="").reuse
    assert reuse.missed_chunks == 0
    not_first = prompt.documents[1:]  # the first one may be computed
    assert reuse.exact + reuse.fused + reuse.recomputed >= sum(map(len, not_first))


def test_forgotten_conversations_are_not_found_again(chat: ChatEngine) -> None:
    prompt, answer = ask(chat, *TURNS)
    chat.save_turn(prompt, answer)
    longer = (*TURNS, PlainMessage("assistant", answer.text), PlainMessage("user", "And now?"))
    assert earlier_turns(chat, *longer) == 1
    chat.delete_traces()
    chat.engine.flush()
    assert chat.engine.sessions.ids() == ()
    assert earlier_turns(chat, *longer) == 0


def test_a_turn_in_progress_when_all_is_forgotten_is_not_saved(chat: ChatEngine) -> None:
    prompt, answer = ask(chat, *TURNS)
    chat.delete_traces()
    chat.save_turn(prompt, answer)
    chat.engine.flush()
    assert chat.engine.sessions.ids() == ()
    assert (
        earlier_turns(
            chat, *TURNS, PlainMessage("assistant", answer.text), PlainMessage("user", "And now?")
        )
        == 0
    )


def sources(prompt: ChatPrompt) -> list[str]:
    return [chunk.metadata["source"] for chunk in prompt.documents]


def test_documents_of_one_text_keep_their_own_sources_in_turn(chat: ChatEngine) -> None:
    text = "The mill of Marl stands by the river."
    given = tuple(ChatDocument(text, {"source": name}) for name in ("a", "b"))
    turns = insert_documents(TURNS, given, " ")
    prompt = chat.build_prompt(ChatInput(turns, given), find_conversation=False)
    assert sources(prompt) == ["a", "b"]

    chat.catalogue.register(given)
    assert sources(chat.build_prompt(ChatInput(turns, ()), find_conversation=False)) == ["a", "b"]
    for name in ("a", "b"):  # a retriever registers what it finds
        chat.catalogue.register([ChatDocument(text, {"source": name})])
        once = (PlainMessage("user", f"{text} Where is it?"),)
        assert sources(chat.build_prompt(ChatInput(once, ()), find_conversation=False)) == [name]


class TestFollow:
    def test_an_answer_comes_whole_and_its_turn_is_saved(self, chat: ChatEngine) -> None:
        prompt = chat.build_prompt(ChatInput(TURNS, ()))
        events = chat.engine.stream(
            prompt.question, prompt.pieces, prompt.session, max_new_tokens=4, separator=""
        )
        *steps, last = chat.follow(prompt, events)
        assert isinstance(last, ChatAnswer)
        assert "".join(step.text for step in steps) == last.text == last.answer.text
        said = PlainMessage("assistant", last.text)
        assert earlier_turns(chat, *TURNS, said, PlainMessage("user", "And now?")) == 1

    @pytest.mark.parametrize("ends", ["raises", "is left"])
    def test_a_turn_without_an_answer_is_deleted_and_its_stream_closed(
        self, chat: ChatEngine, ends: str
    ) -> None:
        prompt = chat.build_prompt(ChatInput(TURNS, ()))
        closed = list[str]()

        def events() -> Generator[object, None, None]:
            try:
                yield TokenEvent("a", 1)
                if ends == "raises":
                    raise DeadlineError("The time is over.")
                yield TokenEvent("b", 2)
            finally:
                closed.append("closed")

        steps = chat.follow(prompt, events())
        assert next(steps).text == "a"
        if ends == "raises":
            with pytest.raises(DeadlineError):
                next(steps)
        steps.close()
        assert closed == ["closed"]
        assert prompt.session is not None and prompt.session.deleted

    @pytest.mark.parametrize("fails", ["saving", "saving and deleting"])
    def test_an_answer_arrives_though_its_turn_cannot_be_saved(
        self, chat: ChatEngine, monkeypatch: pytest.MonkeyPatch, fails: str
    ) -> None:
        prompt = chat.build_prompt(ChatInput(TURNS, ()))
        answer = Answer("Ada.", (1,), "stop", Timing(), Reuse())
        deleted = list[object]()

        def refused(*_: object) -> None:
            raise StoreError("The disk failed.")

        monkeypatch.setattr(chat, "save_turn", refused)
        monkeypatch.setattr(chat, "delete_turn", deleted.append if fails == "saving" else refused)

        def events() -> Generator[object, None, None]:
            yield TokenEvent("Ada.", 1)
            yield answer

        _, last = chat.follow(prompt, events())
        assert isinstance(last, ChatAnswer) and last.text == "Ada."
        assert "this turn is not stored for the next one: The disk failed." in str(last.answer)
        assert deleted == ([prompt] if fails == "saving" else [])

    def test_text_that_was_held_back_and_is_no_call_comes_before_the_answer(
        self, chat: ChatEngine
    ) -> None:
        prompt = chat.build_prompt(ChatInput(TURNS, ()), find_conversation=False)
        answer = Answer('{"a": 1}', (1,), "stop", Timing(), Reuse())

        def events() -> Generator[object, None, None]:
            yield TokenEvent('{"a": 1}', 1)
            yield answer

        held, rest, last = chat.follow(prompt, events(), ["search"])
        assert (held.text, rest.text, last.text) == ("", '{"a": 1}', '{"a": 1}')
