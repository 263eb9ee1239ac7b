"""Sends the requests of one client, and judges each outcome: answered, refused as the API documents, or wrong."""

import json
import random
import time
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import httpx

from .findings import STATUS, Findings
from .world import Replica, World

TIMEOUT_S = 200.0  # TIMEOUT_S is longer than any deadline of an answer, so a server that hangs shows as a wrong status.
BROKEN = "connection"  # BROKEN is the code of a broken connection.
CONFLICT, LOCKED = "session_conflict", "store_locked"


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


@dataclass(slots=True)
class Caller:
    """The connections of one client, to each replica."""

    world: World
    findings: Findings
    tenant: str
    _clients: dict[str, httpx.Client] = field(default_factory=dict)

    def send(
        self, replica: Replica, method: str, path: str, expected: Collection[int] = (200,), *,
        allowed: Collection[str] = (), named: bool = False, cut_after: int | None = None, **request: Any,
    ) -> Reply:  # fmt: skip
        """Send a request. `allowed`: the codes of refusals that are documented for it; others are wrong.

        `session_unavailable` is allowed to a request that is `named`, while Redis is away. A stream is read to its end,
        or closed after `cut_after` events.
        """
        began = time.monotonic()
        try:
            with self._client(replica).stream(method, path, **request) as response:
                if response.headers.get("content-type", "").startswith("text/event-stream"):
                    reply = _events(replica, response, cut_after)
                else:
                    response.read()
                    reply = _whole(replica, response, expected)
        except (httpx.TransportError, httpx.StreamError) as error:
            reply = Reply(replica, 0, repr(error), BROKEN)
        self.findings.count(f"responses with status {reply.status}")
        if reply.is_answered:
            return reply
        if self._is_documented(reply, began, named, allowed):
            self.findings.count(f"refused as documented: {reply.code}")
        else:
            where = f"{method} {path} at {replica.name} ({self.tenant}) after {time.monotonic() - began:.1f} s"
            self.findings.fail(STATUS, f"{where}: {reply.status} {reply.code}: {str(reply.body)[:600]}")
        return reply

    def choose(self, rng: random.Random) -> Replica:
        """A replica that takes requests; forgets the connections to those that do not."""
        for url in self._clients.keys() - {replica.process.url for replica in self.world.serving}:
            self._clients.pop(url).close()
        return self.world.choose(rng)

    def close(self) -> None:
        """Close the connections; a later request opens them again."""
        while self._clients:
            self._clients.popitem()[1].close()

    def _client(self, replica: Replica) -> httpx.Client:
        url = replica.process.url
        if url not in self._clients:
            self._clients[url] = replica.process.client(TIMEOUT_S, headers=self.world.headers[self.tenant])
        return self._clients[url]

    def _is_documented(self, reply: Reply, began: float, named: bool, allowed: Collection[str]) -> bool:
        if reply.code == BROKEN:
            return self.world.may_break(reply.replica, began)
        if reply.code == "shutting_down":
            return self.world.may_refuse(reply.replica)
        if reply.code == "session_unavailable":
            return named and self.world.redis_was_away(began)
        return reply.code in allowed


def _whole(replica: Replica, response: httpx.Response, expected: Collection[int]) -> Reply:
    body: Any = response.text
    with suppress(ValueError):
        body = response.json()
    if response.status_code in expected:
        return Reply(replica, response.status_code, body)
    error = body.get("error") if isinstance(body, dict) else None
    code = (error or {}).get("code") or str(response.status_code)
    if response.status_code == 503 and "retry-after" not in response.headers:
        code = f"{code} without Retry-After"
    return Reply(replica, response.status_code, body, code)


def _events(replica: Replica, response: httpx.Response, cut_after: int | None) -> Reply:
    """Read the events of a stream; an error event is the reply's code."""
    events: list[Any] = []
    for line in response.iter_lines():
        if not line.startswith("data: "):
            continue
        data = line.removeprefix("data: ")
        if data == "[DONE]":
            return Reply(replica, 200, events)
        events.append(json.loads(data))
        if error := events[-1].get("error"):
            return Reply(replica, 200, events, error["code"] or error["type"])
        if cut_after is not None and len(events) >= cut_after:
            return Reply(replica, 200, events)
    if not (events and "finish_reason" in events[-1]):
        return Reply(replica, 0, events, BROKEN)  # /v1/ask ends with the whole answer, a chat with [DONE]
    return Reply(replica, 200, events)


def answer_of(reply: Reply) -> str:
    """The answer's text, of /v1/ask or a chat, streamed or not."""
    body = reply.body
    if isinstance(body, list) and "answer" not in body[-1]:
        deltas = (choice["delta"] for event in body for choice in event["choices"])
        return "".join(delta.get("content") or "" for delta in deltas)
    body = body[-1] if isinstance(body, list) else body
    return str(body["answer"] if "answer" in body else body["choices"][0]["message"]["content"])
