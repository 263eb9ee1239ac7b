"""The questions and conversations of a soak, and their answers from a replica that does nothing else."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tests.api.helpers import questions
from tests.api.whole import documents

from .caller import Caller, Reply, answer_of
from .world import Replica

COLLECTION = "c"  # COLLECTION is every tenant's, with the example documents, and never changes.
MAX_TOKENS = 24
MODES = ("fused", "prefix", "none")


@dataclass(frozen=True, slots=True)
class Talk:
    """A conversation: what is asked in its turns, and what a replica answers that does nothing else."""

    kind: str  # "ask", "chat" or "unnamed"
    turns: tuple[str, ...]
    answers: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Solo:
    """The answers without other load."""

    questions: dict[str, str]
    talks: tuple[Talk, ...]


def question_body(question: str, reuse: str) -> dict[str, Any]:
    return {"question": question, "collection": COLLECTION, "max_tokens": MAX_TOKENS, "reuse": reuse}


def turn_request(talk: Talk, number: int, said: Sequence[str], session_id: str) -> tuple[str, dict[str, Any]]:
    """Path and body of a turn; `said` holds the answers so far. History is reused where that is exact."""
    text = talk.turns[number]
    if talk.kind == "ask":
        return "/v1/ask", {**question_body(text, "prefix"), "k": 2, "session_id": session_id}
    body: dict[str, Any] = {"model": "reader", "max_tokens": MAX_TOKENS, "ragkv": {"reuse": "prefix"}}
    if talk.kind == "chat":
        body["messages"] = [{"role": "user", "content": text}]
        return "/v1/chat/completions", {**body, "session_id": session_id, "rag": {"collection": COLLECTION, "k": 2}}
    body["messages"] = []
    for asked, answer in zip(talk.turns, said, strict=False):
        body["messages"] += [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]
    body["messages"].append({"role": "user", "content": text})
    return "/v1/chat/completions", body


def answer_alone(caller: Caller, replica: Replica, count: int = 8) -> Solo:
    """Answer everything once.

    A question is taken if its answer is the same whatever is reused: then it does not matter which entries a replica
    happens to hold, and every other answer is wrong.
    """
    found: dict[str, str] = {}
    for one in questions():
        answers = {_answered(caller, replica, "/v1/ask", question_body(one["question"], mode)) for mode in MODES}
        if len(answers) == 1:
            found[one["question"]] = answers.pop()
        if len(found) == count:
            break
    assert found, "no question is answered the same with and without reuse"
    asked = list(found)
    talks = [
        Talk(kind, tuple(asked[(first + n) % len(asked)] for n in range(3)))
        for kind in ("ask", "chat")
        for first in (0, 3)
    ]
    talks += [Talk("unnamed", tuple(_told(first + n) for n in range(4))) for first in (0, 4)]
    return Solo(found, tuple(_held(caller, replica, talk, number) for number, talk in enumerate(talks)))


def _told(number: int) -> str:
    """A message with a few sentences of a document, and a question."""
    texts = documents()
    sentences = texts[number % len(texts)]["text"].split(". ")[:4]
    return f"{'. '.join(sentences)}. {questions()[number]['question']}"


def _held(caller: Caller, replica: Replica, talk: Talk, number: int) -> Talk:
    """The talk with its answers."""
    said: list[str] = []
    for turn in range(len(talk.turns)):
        path, body = turn_request(talk, turn, said, f"solo-{number}")
        said.append(_answered(caller, replica, path, body))
    if talk.kind != "unnamed":
        assert caller.send(replica, "DELETE", f"/v1/sessions/solo-{number}").is_answered
    return Talk(talk.kind, talk.turns, tuple(said))


def _answered(caller: Caller, replica: Replica, path: str, body: dict[str, Any]) -> str:
    reply: Reply = caller.send(replica, "POST", path, json=body)
    assert reply.is_answered, reply.body
    return answer_of(reply)
