"""Sends the requests of one worker, and judges each outcome: answered, refused as the API documents, or wrong."""

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

TIMEOUT_S = 200.0  # longer than any deadline of an answer, so that a server that hangs shows as a wrong status
BROKEN = "connection"  # the code of a broken connection
CONFLICT, LOCKED, MISSING = "session_conflict", "store_locked", "404"
FLOODED = (
    "tenant_queue_full",
    "queue_full",
    "uploads_busy",
    "deadline_exceeded",
)  # codes that a tenant that floods may get


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
    """The clients of one worker, one for each replica."""

    world: World
    findings: Findings
    tenant: str
    _clients: dict[str, httpx.Client] = field(default_factory=dict)

    def send(self, replica: Replica, method: str, path: str, expected: Collection[int] = (200,), **more: Any) -> Reply:
        """Send a request. `allowed`: the codes of refusals that are documented for it; others are wrong.

        `session_unavailable` is allowed to a request that is `named`, while Redis is away.
        """
        allowed, named = more.pop("allowed", ()), more.pop("named", False)
        began = time.monotonic()
        try:
            response = self._client(replica).request(method, path, **more)
            reply = self._reply(replica, response, expected)
        except (httpx.TransportError, httpx.StreamError) as error:
            reply = Reply(replica, 0, repr(error), BROKEN)
        self._judge(reply, began, f"{method} {path}", named, allowed)
        return reply

    def stream(self, replica: Replica, path: str, body: dict[str, Any], **more: Any) -> Reply:
        """Send a request for a stream, and read it to its end, or close it after `cut_after` events."""
        allowed, named = more.pop("allowed", ()), more.pop("named", False)
        began, cut_after = time.monotonic(), more.pop("cut_after", None)
        try:
            with self._client(replica).stream("POST", path, json={**body, "stream": True}) as response:
                if response.status_code != 200:
                    response.read()
                    reply = self._reply(replica, response, (200,))
                else:
                    reply = _read(replica, response, cut_after)
        except (httpx.TransportError, httpx.StreamError) as error:
            reply = Reply(replica, 0, repr(error), BROKEN)
        self._judge(reply, began, f"stream of {path}", named, allowed)
        return reply

    def close(self) -> None:
        """Close the clients; a later request opens them again."""
        while self._clients:
            self._clients.popitem()[1].close()

    def choose(self, rng: random.Random) -> Replica:
        """A replica that takes requests; forgets the connections to those that do not."""
        gone = self._clients.keys() - {replica.url for replica in self.world.serving}
        for url in gone:
            self._clients.pop(url).close()
        return self.world.choose(rng)

    def _client(self, replica: Replica) -> httpx.Client:
        if replica.url not in self._clients:
            headers = self.world.headers[self.tenant]
            self._clients[replica.url] = replica.process.client(TIMEOUT_S, headers=headers)
        return self._clients[replica.url]

    @staticmethod
    def _reply(replica: Replica, response: httpx.Response, expected: Collection[int]) -> Reply:
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

    def _judge(self, reply: Reply, began: float, what: str, named: bool, allowed: Collection[str]) -> None:
        self.findings.respond(reply.status)
        if reply.is_answered:
            return
        if self._is_documented(reply, began, named, allowed):
            self.findings.refuse(reply.code)
            return
        seconds = time.monotonic() - began
        shown = json.dumps(reply.body, default=str)[:600]
        name = f"{reply.replica.name} ({self.tenant})"
        self.findings.fail(STATUS, f"{what} at {name} after {seconds:.1f} s: {reply.status} {reply.code}: {shown}")

    def _is_documented(self, reply: Reply, began: float, named: bool, allowed: Collection[str]) -> bool:
        if reply.code == BROKEN:
            return self.world.may_break(reply.replica, began)
        if reply.code == "shutting_down":
            return self.world.may_refuse(reply.replica)
        if reply.code == "session_unavailable":
            return named and self.world.redis_was_away(began)
        return reply.code in allowed


def _read(replica: Replica, response: httpx.Response, cut_after: int | None) -> Reply:
    """Read the events of a stream; an error event is the reply's code."""
    events: list[Any] = []
    for line in response.iter_lines():
        if not line.startswith("data: "):
            continue
        data = line.removeprefix("data: ")
        if data == "[DONE]":
            return Reply(replica, 200, events)
        events.append(json.loads(data))
        if "error" in events[-1]:
            return Reply(replica, 200, events, events[-1]["error"]["code"] or events[-1]["error"]["type"])
        if cut_after is not None and len(events) >= cut_after:
            break
    if cut_after is None and not (events and "finish_reason" in events[-1]):
        return Reply(replica, 0, events, BROKEN)  # /v1/ask ends with the whole answer, a chat with [DONE]
    return Reply(replica, 200, events)


def answer_of(reply: Reply) -> str:
    """The answer's text, of /v1/ask or a chat, streamed or not."""
    body = reply.body
    if isinstance(body, list):
        if "answer" in body[-1]:
            return str(body[-1]["answer"])
        deltas = (choice["delta"] for event in body for choice in event["choices"])
        return "".join(delta.get("content") or "" for delta in deltas)
    return str(body["answer"] if "answer" in body else body["choices"][0]["message"]["content"])
