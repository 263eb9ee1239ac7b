"""A list of messages that continues an earlier list finds its session; no other list does."""

import errno
from pathlib import Path
from typing import Any

import pytest
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, SystemMessage
from langchain_core.runnables.history import RunnableWithMessageHistory

from ragkv import EngineConfig, StoreConfig
from ragkv.errors import InputError, SessionUnavailableError
from ragkv.integrations.langchain import ChatRagKV, RagKVChatMessageHistory, close_engines
from ragkv.integrations.langchain import history as histories
from tests.faults import os_error, raising
from tests.reader import READER

from .helpers import A, chat, documents, kv


def turns(message: BaseMessage) -> int:
    """The number of stored earlier turns that were found."""
    return int(kv(message)["conversation"]["turns"])


def cache_read(message: BaseMessage) -> int:
    """The number of reused tokens that are exact."""
    return int(message.usage_metadata["input_token_details"]["cache_read"])  # type: ignore[attr-defined]


def talk(
    llm: ChatRagKV, *questions: str, system: str | None = None, **how: Any
) -> list[BaseMessage]:
    """A conversation in which each question is sent with all earlier messages."""
    messages: list[BaseMessage] = [SystemMessage(system)] if system else []
    for question in questions:
        messages.append(HumanMessage(question))
        messages.append(llm.invoke(messages, **how))
    return messages


@pytest.mark.parametrize("system", [None, "Be brief."])
def test_each_turn_of_a_conversation_reuses_all_earlier_turns_exactly(
    llm: ChatRagKV, system: str | None
) -> None:
    answers = [
        one
        for one in talk(llm, "Who?", "And why?", "Really?", system=system)
        if isinstance(one, AIMessage)
    ]
    assert [turns(answer) for answer in answers] == [0, 1, 2]
    # a system text other than the application's is computed
    prefix = 0 if system else cache_read(answers[0])
    for answer in answers[1:]:
        stored = kv(answer)["conversation"]["tokens"]
        assert prefix + stored - 32 < cache_read(answer) <= prefix + stored, (
            "all but the template's text after an answer"
        )
    assert turns(llm.invoke("Someone else?")) == 0


def test_with_a_chunk_in_the_system_text_no_conversation_is_saved(llm: ChatRagKV) -> None:
    llm.ingest([A])
    said = talk(llm, "Who?", "And why?", system=f"Use this: {A.page_content}")
    assert turns(said[-1]) == 0
    assert len(kv(said[-1])["documents"]) == 1


@pytest.mark.parametrize("system", [None, "Be brief."])
def test_answers_of_a_conversation_are_those_without_stored_history(system: str | None) -> None:
    """Uses the reader, because its answers are words, whose text has the same token ids as the
    answer.
    """
    llm = chat(READER, config=EngineConfig(dtype="float32"), min_new_tokens=None, ratio=1.0)
    context = " ".join(one.page_content for one in documents())
    questions = (
        f"{context} By what other name is Enswyn known?",
        "And which instrument does she play?",
        "And her job?",
    )
    messages = talk(llm, *questions, system=system)
    answers = [(at, one) for at, one in enumerate(messages) if isinstance(one, AIMessage)]
    assert [str(one.content).strip() for _, one in answers[:2]] == ["Ackox", "oboe"]
    alone = chat(READER, config=llm.config, min_new_tokens=None, ratio=1.0, conversations=False)
    for at, answer in answers:
        afresh = alone.invoke(messages[:at])
        assert afresh.content == answer.content
        assert afresh.usage_metadata["input_tokens"] == answer.usage_metadata["input_tokens"]  # type: ignore[index]


def test_after_an_edited_message_no_stored_turn_is_found(llm: ChatRagKV) -> None:
    messages = talk(llm, "Who?", "And why?")
    assert turns(llm.invoke([HumanMessage("Whom?"), *messages[1:], HumanMessage("So?")])) == 0
    assert turns(llm.invoke([*messages, HumanMessage("So?")])) == 2


def test_an_answer_can_be_requested_again_and_a_conversation_can_branch(llm: ChatRagKV) -> None:
    messages = talk(llm, "Who?", "And why?")
    again = llm.invoke(messages[:3])
    assert (turns(again), again.content) == (1, messages[3].content)
    assert turns(llm.invoke([*messages[:2], HumanMessage("But where?")])) == 1
    assert turns(llm.invoke([*messages, HumanMessage("So?")])) == 2


def test_a_cancelled_or_failed_answer_leaves_no_session(llm: ChatRagKV) -> None:
    messages = talk(llm, "Who?")
    more = [*messages, HumanMessage("And why?")]
    before = {info.session_id for info in llm.shared.engine.sessions.list()}
    stream = llm.stream(more)
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    with pytest.raises(InputError):
        llm.invoke([*messages, HumanMessage("x" * 9_000)])
    assert {info.session_id for info in llm.shared.engine.sessions.list()} == before
    assert turns(llm.invoke(more)) == 1


def test_a_streamed_answer_saves_its_turn(llm: ChatRagKV) -> None:
    messages: list[BaseMessage] = [HumanMessage("Who, then?")]
    text = "".join(str(chunk.content) for chunk in llm.stream(messages))
    assert turns(llm.invoke([*messages, AIMessage(text), HumanMessage("And why?")])) == 1


def test_with_a_session_id_the_new_message_alone_is_enough(llm: ChatRagKV) -> None:
    whole = talk(llm, "Who?", "And why?")
    first = llm.invoke("Who?", session_id="named")
    second = llm.invoke("And why?", session_id="named")
    assert [first.content, second.content] == [one.content for one in whole[1::2]]
    assert second.usage_metadata == whole[3].usage_metadata  # type: ignore[attr-defined]
    assert kv(second)["conversation"]["session"] == "named"


def test_with_conversations_off_no_turn_is_saved(tiny: str) -> None:
    assert turns(talk(chat(tiny, conversations=False), "Who are they?", "Why?")[-1]) == 0


def test_beyond_the_limit_the_oldest_session_is_deleted(
    llm: ChatRagKV, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ragkv.chat.finder.MAX_SAVED", 2)
    monkeypatch.setattr("ragkv.chat.finder.TRIMMED", 1)
    talks = [talk(llm, f"Question {n}?") for n in range(3)]
    llm.shared.engine.flush()
    assert (
        len(
            [one for one in llm.shared.engine.sessions.list() if one.session_id.startswith("chat-")]
        )
        == 2
    )
    assert turns(llm.invoke([*talks[1], HumanMessage("So?")])) == 1
    assert turns(llm.invoke([*talks[0], HumanMessage("So?")])) == 0


def test_a_conversation_continues_in_a_new_process(tiny: str, tmp_path: Path) -> None:
    """Two processes are simulated by two engines, one after the other, on one directory."""
    config = EngineConfig(store=StoreConfig(directory=str(tmp_path)))
    messages = talk(chat(tiny, config=config), "Who?", "And why?", system="Be brief.")
    close_engines()
    again = chat(tiny, config=config).invoke([*messages, HumanMessage("Really?")])
    assert turns(again) == 2
    assert cache_read(again) > 0.8 * kv(again)["conversation"]["tokens"]


class TestHistories:
    @pytest.fixture(params=["memory", "directory"])
    def config(self, request: pytest.FixtureRequest, tmp_path: Path) -> EngineConfig:
        return EngineConfig(
            store=StoreConfig(directory=str(tmp_path) if request.param == "directory" else None)
        )

    @pytest.mark.filterwarnings("ignore:RunnableWithMessageHistory")
    def test_a_runnable_with_message_history_reuses_stored_turns_until_cleared(
        self, tiny: str, config: EngineConfig
    ) -> None:
        llm = chat(tiny, config=config)
        chain = RunnableWithMessageHistory(
            llm, lambda session_id: RagKVChatMessageHistory(session_id, llm)
        )
        how: Any = {"configurable": {"session_id": "s"}}
        answers = [
            chain.invoke(HumanMessage(text), config=how) for text in ("Who?", "And why?", "Really?")
        ]
        assert [turns(answer) for answer in answers] == [0, 1, 2]
        assert cache_read(answers[2]) > cache_read(answers[1]) > cache_read(answers[0]), (
            "each turn reuses more history"
        )
        history = RagKVChatMessageHistory("s", llm)
        assert [one.content for one in history.messages][0::2] == ["Who?", "And why?", "Really?"]
        assert [one.content for one in history.messages][1::2] == [
            answer.content for answer in answers
        ]
        assert RagKVChatMessageHistory("t", llm).messages == []
        told = list(history.messages)
        history.clear()
        assert RagKVChatMessageHistory("s", llm).messages == []
        assert turns(llm.invoke([*told, HumanMessage("So?")])) == 0, "clear deleted the session"

    def test_a_history_in_a_directory_is_durable_private_and_empty_if_damaged(
        self, tiny: str, tmp_path: Path
    ) -> None:
        llm = chat(tiny, config=EngineConfig(store=StoreConfig(directory=str(tmp_path))))
        RagKVChatMessageHistory("s", llm).add_messages([HumanMessage("Who?"), AIMessage("She.")])
        (file,) = (tmp_path / "histories").iterdir()
        assert file.stat().st_mode & 0o077 == 0
        assert [one.type for one in RagKVChatMessageHistory("s", llm).messages] == ["human", "ai"]
        file.write_text("{ broken")
        assert RagKVChatMessageHistory("s", llm).messages == []

    def test_a_history_that_cannot_be_read_is_left_alone_and_a_damaged_one_moved_aside(
        self, tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        llm = chat(tiny, config=EngineConfig(store=StoreConfig(directory=str(tmp_path))))
        history = RagKVChatMessageHistory("s", llm)
        history.add_messages([HumanMessage("Who?"), AIMessage("She.")])
        (file,) = (tmp_path / "histories").iterdir()
        with monkeypatch.context() as patch:
            patch.setattr(Path, "read_bytes", raising(os_error(errno.EMFILE)))
            patch.setattr(Path, "read_text", raising(os_error(errno.EMFILE)))
            with pytest.raises(SessionUnavailableError, match="ask again"):
                history.add_messages([HumanMessage("And why?")])
        assert len(history.messages) == 2
        file.write_text("{ broken")
        history.add_messages([HumanMessage("And why?")])
        assert len(history.messages) == 1
        assert [one.read_text() for one in file.parent.glob("*.damaged")] == ["{ broken"]
        history.clear()
        assert not list(file.parent.iterdir())


def test_a_history_whose_model_is_being_loaded_delays_no_other_history() -> None:
    """The lock is of all histories."""

    class Loaded(Exception):
        pass

    class Loading:
        @property
        def shared(self) -> object:
            assert not histories._lock.locked()
            raise Loaded

    slow = RagKVChatMessageHistory("s", Loading())  # type: ignore[arg-type]
    for use in (lambda: slow.messages, lambda: slow.add_messages([HumanMessage("?")]), slow.clear):
        with pytest.raises(Loaded):
            use()
