"""A list of messages that goes on from an earlier one finds its session, and nothing else does."""

from pathlib import Path
from typing import Any

import pytest
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, SystemMessage
from langchain_core.runnables.history import RunnableWithMessageHistory

from ragkv import EngineConfig, StoreConfig
from ragkv.errors import InputError
from ragkv.langchain import ChatRagKV, RagKVChatMessageHistory

from .house import chat, documents, needs_reader
from .test_documents import A, kv


@pytest.fixture
def llm(tiny: str) -> ChatRagKV:
    return chat(tiny)


def session(message: BaseMessage) -> str:
    return str(kv(message)["session"])


def talk(llm: ChatRagKV, *questions: str, system: str | None = None, **how: Any) -> list[BaseMessage]:
    """A conversation: every turn is asked with all the messages before it."""
    messages: list[BaseMessage] = [SystemMessage(system)] if system else []
    for question in questions:
        messages.append(HumanMessage(question))
        messages.append(llm.invoke(messages, **how))
    return messages


@pytest.mark.parametrize("system", [None, "Be brief.", f"Use this: {A.page_content}"])
def test_a_conversation_keeps_its_session(llm: ChatRagKV, system: str | None) -> None:
    llm.ingest([A])
    answers = talk(llm, "Who?", "And why?", "Really?", system=system)[1 if system is None else 2 :: 2]
    assert len({session(answer) for answer in answers}) == 1
    assert session(talk(llm, "Someone else?")[-1]) != session(answers[0])


@needs_reader
@pytest.mark.parametrize("system", [None, "Be brief."])
def test_what_is_said_is_what_would_be_said_afresh(system: str | None) -> None:
    """On the reader, whose answers are words: what it says and those words are the same ids."""
    llm = chat("reader", config=EngineConfig(dtype="float32"), min_new_tokens=None, ratio=1.0)
    context = " ".join(one.page_content for one in documents())
    questions = (
        f"{context} By what other name is Enswyn known?",
        "And which instrument does she play?",
        "And her job?",
    )
    messages = talk(llm, *questions, system=system)
    answers = [(at, one) for at, one in enumerate(messages) if isinstance(one, AIMessage)]
    assert [str(one.content).strip() for _, one in answers[:2]] == ["Ackox", "oboe"]
    for at, answer in answers:
        afresh = llm.invoke(messages[:at])
        assert afresh.content == answer.content
        assert afresh.usage_metadata["input_tokens"] == answer.usage_metadata["input_tokens"]  # type: ignore[index]
        assert session(afresh) != session(answer)


def test_history_is_seen_in_the_prompt_s_length(llm: ChatRagKV) -> None:
    first, second = talk(llm, "Who founded the mill of Marl?", "Why?")[1::2]
    assert first.usage_metadata and second.usage_metadata  # type: ignore[attr-defined]
    assert second.usage_metadata["input_tokens"] > first.usage_metadata["input_tokens"] + 8  # type: ignore[attr-defined]


def test_an_edited_message_starts_afresh(llm: ChatRagKV) -> None:
    messages = talk(llm, "Who?", "And why?")
    edited = [HumanMessage("Whom?"), *messages[1:]]
    assert session(llm.invoke([*edited, HumanMessage("So?")])) != session(messages[-1])
    assert session(llm.invoke([*messages, HumanMessage("So?")])) == session(messages[-1])


def test_going_back_starts_afresh(llm: ChatRagKV) -> None:
    messages = talk(llm, "Who?", "And why?")
    assert session(llm.invoke(messages[:3])) != session(messages[-1])


def test_a_session_that_went_elsewhere_is_not_gone_on_with(llm: ChatRagKV) -> None:
    messages = talk(llm, "Who?")
    llm.shared.engine.answer("Something else.", (), llm.shared.engine.session(session(messages[-1])), max_new_tokens=1)
    assert session(llm.invoke([*messages, HumanMessage("So?")])) != session(messages[-1])


def test_an_answer_that_was_left_or_failed_leaves_the_session_as_it_was(llm: ChatRagKV) -> None:
    messages = talk(llm, "Who?")
    more = [*messages, HumanMessage("And why?")]
    stream = llm.stream(more)
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    with pytest.raises(InputError):
        llm.invoke([*messages, HumanMessage("x" * 9_000)])
    assert session(llm.invoke(more)) == session(messages[-1])


def test_streams_keep_their_session_too(llm: ChatRagKV) -> None:
    messages: list[BaseMessage] = [HumanMessage("Who, then?")]
    said = list(llm.stream(messages))
    text = "".join(str(chunk.content) for chunk in said)
    again = llm.invoke([*messages, AIMessage(text), HumanMessage("And why?")])
    assert session(again) == kv(next(c for c in said if c.response_metadata))["session"]


def test_a_named_session_needs_only_what_is_new(llm: ChatRagKV) -> None:
    whole = talk(llm, "Who?", "And why?")
    first = llm.invoke("Who?", session_id="named")
    second = llm.invoke("And why?", session_id="named")
    assert [first.content, second.content] == [one.content for one in whole[1::2]]
    assert second.usage_metadata == whole[3].usage_metadata  # type: ignore[attr-defined]
    assert session(second) == "named"


def test_without_conversations_there_is_no_session(tiny: str) -> None:
    assert kv(chat(tiny, conversations=False).invoke("Who?"))["session"] is None


def test_forgotten_conversations_make_room(llm: ChatRagKV, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ragkv.langchain.conversations.KEPT", 2)
    talks = [talk(llm, f"Question {n}?") for n in range(3)]
    sessions = [session(messages[-1]) for messages in talks]
    gone_on = [session(llm.invoke([*messages, HumanMessage("So?")])) for messages in reversed(talks)]
    assert [a == b for a, b in zip(gone_on, reversed(sessions), strict=True)] == [True, True, False]
    assert llm.shared.engine.session(sessions[0]).token_ids == ()


class TestHistories:
    @pytest.fixture(params=["memory", "directory"])
    def config(self, request: pytest.FixtureRequest, tmp_path: Path) -> EngineConfig:
        return EngineConfig(store=StoreConfig(directory=str(tmp_path) if request.param == "directory" else None))

    @pytest.mark.filterwarnings("ignore:RunnableWithMessageHistory")
    def test_a_runnable_with_history_reuses_its_session(self, tiny: str, config: EngineConfig) -> None:
        llm = chat(tiny, config=config)
        chain = RunnableWithMessageHistory(llm, lambda session_id: RagKVChatMessageHistory(session_id, llm))
        how: Any = {"configurable": {"session_id": "s"}}
        answers = [chain.invoke(HumanMessage(text), config=how) for text in ("Who?", "And why?", "Really?")]
        assert len({session(answer) for answer in answers}) == 1
        history = RagKVChatMessageHistory("s", llm)
        assert [one.content for one in history.messages][0::2] == ["Who?", "And why?", "Really?"]
        assert [one.content for one in history.messages][1::2] == [answer.content for answer in answers]
        assert RagKVChatMessageHistory("t", llm).messages == []
        history.clear()
        assert RagKVChatMessageHistory("s", llm).messages == []
        assert llm.shared.engine.session(session(answers[0])).token_ids == ()

    def test_one_in_a_directory_outlives_its_process_and_is_private(self, tiny: str, tmp_path: Path) -> None:
        llm = chat(tiny, config=EngineConfig(store=StoreConfig(directory=str(tmp_path))))
        RagKVChatMessageHistory("s", llm).add_messages([HumanMessage("Who?"), AIMessage("She.")])
        (file,) = (tmp_path / "histories").iterdir()
        assert file.stat().st_mode & 0o077 == 0
        assert [one.type for one in RagKVChatMessageHistory("s", llm).messages] == ["human", "ai"]
        file.write_text("{ broken")
        assert RagKVChatMessageHistory("s", llm).messages == []
