"""A follow-up is searched with the question before it, in every kind of conversation."""

from typing import Any

import pytest
from fastapi.testclient import TestClient

from ragkv.rag.follow_ups import BEFORE_CHARS, follow_up, question_before
from tests.engine.helpers import text_engine

from .helpers import FACTS, filled

FIRST = "Who built the mill of Oro?"
FOLLOW_UP = "And when?"


def ask(client: TestClient, collection: str, asked: list[str], session: bool) -> list[str]:
    """The sources of the last question of a conversation, asked at /v1/ask with a session."""
    for question in asked:
        body = {"question": question, "collection": collection, "k": 1, "retriever": "bm25"}
        body |= {"session_id": "s"} if session else {}
        found = client.post("/v1/ask", json=body).json()
    return [source["text"] for source in found["sources"]]


def chat(client: TestClient, collection: str, asked: list[str], session: bool) -> list[str]:
    """The same at /v1/chat/completions, with a session or with all messages."""
    messages: list[Any] = []
    for question in asked:
        messages.append({"role": "user", "content": question})
        body = {
            "model": "reader",
            "messages": messages[-1:] if session else messages,
            "max_tokens": 4,
            "rag": {"collection": collection, "k": 1, "retriever": "bm25"},
        }
        body |= {"session_id": "c"} if session else {}
        found = client.post("/v1/chat/completions", json=body).json()
        messages.append(found["choices"][0]["message"])
    return [source["text"] for source in found["ragkv"]["sources"]]


@pytest.mark.parametrize(("way", "session"), [(ask, True), (chat, True), (chat, False)])
def test_a_follow_up_finds_by_the_question_before_it(
    client: TestClient, way: Any, session: bool
) -> None:
    filled(client)
    assert way(client, "facts", [FIRST, FOLLOW_UP], session) == [FACTS[1]]


def test_a_question_without_a_conversation_is_searched_alone(client: TestClient) -> None:
    filled(client)
    assert ask(client, "facts", [FIRST, FOLLOW_UP], False) == []


@pytest.mark.parametrize("raw", [False, True])
def test_the_question_before_is_whole_with_and_without_the_template_behind_it(raw: bool) -> None:
    asked = "Which pilots work in the harbour of Oro?"
    with text_engine() as engine:
        session = engine.session("s")
        engine.answer(asked, session=session, raw=raw, max_new_tokens=2)
        assert question_before(session, engine.tokenizer).strip() == asked


def test_of_a_long_question_before_the_end_is_searched_for() -> None:
    assert follow_up("b?", "") == follow_up("b?", " \n") == "b?"
    assert follow_up("b?", f"{'x' * 900} a?") == f"{'x' * (BEFORE_CHARS - 3)} a?\nb?"
