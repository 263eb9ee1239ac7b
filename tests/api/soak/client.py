"""One client of the service under load. It judges each reply: an answer as without load, a refusal
that is documented for that moment, or wrong.
"""

import json
import random
import threading
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import httpx

from tests.api.helpers import questions
from tests.api.whole import documents

from .world import Replica, World

# longer than any deadline of an answer, so a server that hangs shows as a wrong status
TIMEOUT_S = 200.0
RETRY_S = 0.1  # between two attempts
COLLECTION = "c"  # every tenant's, with the example documents; it never changes
MAX_TOKENS = 24
SAMPLE = 3  # acknowledged things that are verified after each replacement
BROKEN = "connection"  # the code of a broken connection
ASK = "/v1/ask"
CHAT = "/v1/chat/completions"
SESSIONS = "/v1/sessions"


@dataclass(frozen=True, slots=True)
class Reply:
    """How a request ended."""

    replica: Replica
    status: int  # 0: the connection broke
    body: Any = None  # parsed; of a stream, its events
    code: str = ""  # why it was not answered: the error's code, or its status

    @property
    def is_answered(self) -> bool:
        return not self.code

    @property
    def answer(self) -> str:
        """The answer's text, of /v1/ask or a chat, streamed or not."""
        if isinstance(self.body, list):
            return "".join(
                one["delta"].get("content") or "" for event in self.body for one in event["choices"]
            )
        return str(
            self.body["answer"]
            if "answer" in self.body
            else self.body["choices"][0]["message"]["content"]
        )


@dataclass(frozen=True, slots=True)
class Talk:
    """A conversation: what is asked in its turns, and what a replica answers that does nothing
    else.
    """

    named: bool
    turns: tuple[str, ...]
    answers: tuple[str, ...] = ()

    def body(self, said: Sequence[str], session: str) -> dict[str, Any]:
        """The request of the next turn; `said` holds the answers so far. History is reused where
        that is exact.
        """
        body: dict[str, Any] = {
            "model": "reader",
            "max_tokens": MAX_TOKENS,
            "ragkv": {"reuse": "prefix"},
        }
        asked = {"role": "user", "content": self.turns[len(said)]}
        if self.named:
            return {
                **body,
                "messages": [asked],
                "session_id": session,
                "rag": {"collection": COLLECTION, "k": 2},
            }
        both = zip(self.turns, said, strict=False)
        told = [(("user", text), ("assistant", answer)) for text, answer in both]
        earlier = [{"role": role, "content": text} for turn in told for role, text in turn]
        return {**body, "messages": [*earlier, asked]}


@dataclass(frozen=True, slots=True)
class Solo:
    """The answers of a replica that does nothing else."""

    questions: dict[str, str]
    talks: tuple[Talk, ...]


class Client(ABC):
    """One client of the service, on its own thread. What it does follows from the seed and its
    name.
    """

    every_s = 1.0  # between the beginnings of two steps

    def __init__(self, world: World, solo: Solo, tenant: str, name: str, seed: int = 1) -> None:
        self.world = world
        self.findings = world.findings
        self.solo = solo
        self.tenant = tenant
        self.name = name
        self.rng = random.Random(f"{seed} {name}")
        self.stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._round = 0
        self._connections: dict[str, httpx.Client] = {}

    @abstractmethod
    def step(self) -> None:
        """Do one thing."""

    def verify(self, most: int | None = None) -> None:  # noqa: B027 - to some nothing is acknowledged
        """Verify what was acknowledged: all of it, or a sample of `most`."""

    def start(self) -> None:
        self.stop.clear()
        self._thread = threading.Thread(target=self._run, name=self.name)
        self._thread.start()

    def end(self) -> None:
        """Stop and wait. Twice is harmless."""
        self.stop.set()
        if self._thread is not None:
            self._thread.join()
        self.close()

    def close(self) -> None:
        """Close the connections; a later request opens them again."""
        while self._connections:
            self._connections.popitem()[1].close()

    def next_name(self) -> str:
        self._round += 1
        return f"{self.name}-{self._round}"

    def send(
        self, method: str, path: str, expected: Collection[int] = (200,), *, allowed: Collection[str] = (),
        named: bool = False, cut_after: int | None = None, **request: Any,
    ) -> Reply:  # fmt: skip
        """Send a request to any replica. `allowed`: the codes of refusals that are documented for
        it.

        `session_unavailable` is allowed to a request that is `named`, while Redis is away. A stream
        is read to its end, or closed after `cut_after` events.
        """
        replica = self.world.choose(self.rng)
        began = time.monotonic()
        try:
            with self._connection(replica).stream(method, path, **request) as response:
                if response.headers.get("content-type", "").startswith("text/event-stream"):
                    reply = _events(replica, response, cut_after)
                else:
                    response.read()
                    reply = _whole(replica, response, expected)
        except (httpx.TransportError, httpx.StreamError) as error:
            reply = Reply(replica, 0, repr(error), BROKEN)
        if reply.is_answered:
            self.findings.count("requests answered")
        elif reply.code in allowed or self.world.allows(replica, reply.code, began, named):
            self.findings.count(f"refused as documented: {reply.code}")
        else:
            where = (
                f"{self.name}: {method} {path} at {replica.name} after "
                f"{time.monotonic() - began:.1f} s"
            )
            self.findings.fail(f"{where}: {reply.status} {reply.code}: {str(reply.body)[:600]}")
        return reply

    def until_answered(self, method: str, path: str, *expected: int, **more: Any) -> Reply | None:
        """Send a request, to any replica each time, until it is answered; `None` if the load ends
        before.
        """
        while not (reply := self.send(method, path, expected or (200,), **more)).is_answered:
            if self.stop.wait(RETRY_S):
                return None
        return reply

    def compare(self, reply: Reply, expected: str, question: str) -> None:
        self.findings.count("answers compared")
        if reply.answer != expected:
            self.findings.fail(
                f"{self.name} at {reply.replica.name}: {question!r}: {reply.answer!r}, not "
                f"{expected!r}"
            )

    def _connection(self, replica: Replica) -> httpx.Client:
        url = f"http://127.0.0.1:{replica.port}"
        if url not in self._connections:
            headers = self.world.headers[self.tenant]
            self._connections[url] = httpx.Client(
                base_url=url, headers=headers, timeout=TIMEOUT_S, trust_env=False
            )
        return self._connections[url]

    def _run(self) -> None:
        seen = self.world.replacements
        while not self.stop.is_set():
            began = time.monotonic()
            try:
                if self.world.replacements != seen:
                    seen = self.world.replacements
                    self.close()
                    self.verify(SAMPLE)
                self.step()
            except Exception:
                self.findings.fail(f"{self.name}: {traceback.format_exc(limit=-4)}")
            self.stop.wait(
                max(0.01, self.every_s * self.rng.uniform(0.8, 1.2) - (time.monotonic() - began))
            )


class Asker(Client):
    """Asks a question, of any replica, until it is answered."""

    def step(self) -> None:
        question = self.rng.choice(list(self.solo.questions))
        body = question_body(question, self.rng.choice(("fused", "fused", "fused", "prefix")))
        if (reply := self.until_answered("POST", ASK, json=body)) is not None:
            self.compare(reply, self.solo.questions[question], question)


def question_body(question: str, reuse: str) -> dict[str, Any]:
    return {
        "question": question,
        "collection": COLLECTION,
        "max_tokens": MAX_TOKENS,
        "reuse": reuse,
    }


def answered_alone(world: World, tenant: str, count: int = 8) -> Solo:
    """Answer everything once, without other load.

    A question is taken if its answer is the same whatever is reused: then it does not matter which
    entries a replica happens to hold, and every other answer is wrong.
    """
    client = Asker(world, Solo({}, ()), tenant, "alone")

    def answer(path: str, body: dict[str, Any]) -> str:
        reply = client.send("POST", path, json=body)
        assert reply.is_answered, reply.body
        return reply.answer

    found: dict[str, str] = {}
    for one in questions():
        question = one["question"]
        answers = {
            answer(ASK, question_body(question, mode)) for mode in ("fused", "prefix", "none")
        }
        if len(answers) == 1:
            found[question] = answers.pop()
        if len(found) == count:
            break
    assert found, "no question is answered the same with and without reuse"
    asked = list(found)
    talks = list[Talk]()
    for number, named in enumerate((True, True, False, False)):
        turns = tuple(
            asked[(3 * number + n) % len(asked)] if named else _told(4 * number + n)
            for n in range(3)
        )
        talk = Talk(named, turns)
        said = list[str]()
        while len(said) < len(turns):
            said.append(answer(CHAT, talk.body(said, f"alone-{number}")))
        talks.append(Talk(named, turns, tuple(said)))
        if named:
            assert client.send("DELETE", f"{SESSIONS}/alone-{number}").is_answered
    client.close()
    return Solo(found, tuple(talks))


def _told(number: int) -> str:
    """A message with a few sentences of a document, and a question."""
    texts = documents()
    sentences = texts[number % len(texts)]["text"].split(". ")[:4]
    return f"{'. '.join(sentences)}. {questions()[number]['question']}"


def _whole(replica: Replica, response: httpx.Response, expected: Collection[int]) -> Reply:
    body: Any = response.text
    with suppress(ValueError):
        body = response.json()
    if response.status_code in expected:
        return Reply(replica, response.status_code, body)
    error = body.get("error") if isinstance(body, dict) else None
    code = (error or {}).get("code") or str(response.status_code)
    if code == "away":  # nginx says it
        return Reply(replica, 0, body, BROKEN)
    if response.status_code == 503 and "retry-after" not in response.headers:
        code = f"{code} without Retry-After"
    return Reply(replica, response.status_code, body, code)


def _events(replica: Replica, response: httpx.Response, cut_after: int | None) -> Reply:
    """Read the events of a chat's stream; an error event is the reply's code."""
    events: list[Any] = []
    for line in response.iter_lines():
        data = line.removeprefix("data: ")
        if data == "[DONE]":
            return Reply(replica, 200, events)
        if not data:
            continue
        events.append(json.loads(data))
        if error := events[-1].get("error"):
            return Reply(replica, 200, events, error["code"] or error["type"])
        if len(events) == cut_after:
            return Reply(replica, 200, events)
    return Reply(replica, 0, events, BROKEN)
