"""Replicas of the service on one Redis server, which can go away and come back."""

import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import redis
from fastapi import FastAPI

from ragkv import Engine, EngineConfig, StoreConfig
from ragkv.config import RedisConfig, SessionConfig
from ragkv.runtime import Closing
from tests.api.helpers import app_on, on_port, plain
from tests.cluster.faulty_proxy import Proxy
from tests.cluster.servers import LOOPBACK, RedisServer

TIMEOUT_S = 2.0  # of the Redis server
PATIENT_S = 10.0  # the same where it is not away, on a machine that runs other tests too
SHUTTING_DOWN = "shutting_down"
QUESTION = "Who built the harbour of Oro?"


class AwayRedis(Closing):
    """A Redis server behind a proxy that can cut it off."""

    def __init__(self, *options: str) -> None:
        """`options` are those of the server's command."""
        self.server = RedisServer(*options)
        self.proxy = Proxy((LOOPBACK, self.server.port))
        self.url = f"redis://{LOOPBACK}:{self.proxy.port}/0"

    @property
    def url_of_another_database(self) -> str:
        """The same server without anything that the others stored."""
        return self.url.removesuffix("0") + "1"

    def leave(self, how: str) -> None:
        """Refuse connections, or never answer again."""
        if how == "stalled":
            self.proxy.stalled = True
        else:
            self.proxy.refusing = True
            self.proxy.close_connections()

    def come_back(self) -> None:
        self.proxy.stalled = self.proxy.refusing = False

    def saved(self) -> set[bytes]:
        """The names of the conversations without a name that the server has."""
        with redis.Redis(unix_socket_path=self.server.socket) as client:
            return set(client.scan_iter("ragkv:sessions:*:m:chat-*"))

    def close(self) -> None:
        self.proxy.close()
        self.server.close()


def replica(model: Engine, home: Path, name: str, url: str, **settings: Any) -> FastAPI:
    """A replica with a KV directory of its own; all replicas share `home`."""
    store = StoreConfig(
        memory_bytes=50_000_000,
        redis=RedisConfig(**{"url": url, "timeout_s": TIMEOUT_S, **settings}),
    )
    config = EngineConfig(store=store, session=SessionConfig(shared=True))
    return app_on(model, home, kv_home=str(home / name), engine=config)


def process_settings(kv_home: Path, url: str, timeout_s: float) -> dict[str, str]:
    """The environment of a replica that is a process of its own."""
    return {
        "RAGKV_SERVE__KV_HOME": str(kv_home),
        "RAGKV_STORE__REDIS__URL": url,
        "RAGKV_STORE__REDIS__TIMEOUT_S": str(timeout_s),
        "RAGKV_SESSION__SHARED": "true",
    }


@dataclass(slots=True)
class Replicas:
    """Replicas on ports, in this process; one of them can be replaced while requests run."""

    model: Engine
    home: Path
    url: str
    urls: list[str] = field(default_factory=list)  # of the replicas that take requests
    started: int = 0
    _stacks: dict[str, ExitStack] = field(default_factory=dict)

    def start(self) -> str:
        """Start a replica and let it open its tenant; returns its address."""
        self.started += 1
        stack = ExitStack()
        app = replica(self.model, self.home, f"kv-{self.started}", self.url, timeout_s=PATIENT_S)
        url = stack.enter_context(on_port(app))
        self._stacks[url] = stack
        with plain(url) as client:
            assert chat(client, [{"role": "user", "content": "Hello"}], max_tokens=1)[1] == "end"
        self.urls.append(url)
        return url

    def replace_oldest(self) -> None:
        """Start a replica, then end the oldest one, which finishes its answers."""
        self.start()
        oldest = self.urls.pop(0)
        self._stacks.pop(oldest).close()

    def close(self) -> None:
        self.urls.clear()
        for stack in self._stacks.values():
            stack.close()


@contextmanager
def running(replicas: Replicas, count: int) -> Iterator[Replicas]:
    try:
        for _ in range(count):
            replicas.start()
        yield replicas
    finally:
        replicas.close()


def chat(
    client: httpx.Client,
    messages: list[dict[str, str]],
    *,
    max_tokens: int,
    session: str | None = None,
) -> tuple[str, str]:
    """The streamed answer, and how the stream ended: "end", an error's code and message, or "cut".

    Reuses only what is exact, so that the answer is that of a full prefill whatever is stored.
    """
    models = client.get("/v1/models")
    if models.status_code != 200:
        return "", _described(models.json())
    body = {
        "model": models.json()["data"][-1]["id"],
        "messages": messages,
        "max_tokens": max_tokens,
        "stream": True,
        "ragkv": {"reuse": "prefix"},
    }
    if session is not None:
        body["session_id"] = session
    text = ""
    ended = "cut"
    with client.stream("POST", "/v1/chat/completions", json=body) as response:
        if response.status_code != 200:
            return "", _described(json.loads(response.read()))
        for line in response.iter_lines():
            data = line.removeprefix("data: ")
            if data == "[DONE]":
                ended = "end"
            elif data:
                found = httpx.Response(200, text=data).json()
                if "error" in found:
                    return text, _described(found)
                text += "".join(choice["delta"].get("content") or "" for choice in found["choices"])
    return text, ended


def _described(body: Mapping[str, Any]) -> str:
    return f"{body['error']['code']}: {body['error']['message']}"


@contextmanager
def _unanswered() -> Iterator[None]:
    """Leaves a request that a replica did not take: it could not be reached, or it closed its idle
    connections as the request came.
    """
    try:
        yield
    except httpx.ConnectError:
        pass
    except httpx.RemoteProtocolError as error:
        if "without sending a response" not in str(error):
            raise


@dataclass(slots=True)
class Talk:
    """A conversation of several turns, spread over the replicas, which is held again and again."""

    first: str
    turns: int
    named: bool = False
    # the messages of each time it was held
    rounds: list[list[dict[str, str]]] = field(default_factory=list)
    ends: list[str] = field(default_factory=list)  # how each stream ended

    def run(self, urls: list[str], done: threading.Event | None = None) -> None:
        """Hold it once, or until `done` is set."""
        while not self.rounds or not (done is None or done.is_set()):
            messages: list[dict[str, str]] = []
            session = f"{self.first}-{len(self.rounds)}" if self.named else None
            for number in range(self.turns):
                messages.append({"role": "user", "content": f"{self.first} {number}"})
                text = ""
                end = SHUTTING_DOWN
                while end.startswith(SHUTTING_DOWN):  # as a proxy does, ask another replica
                    with _unanswered(), plain(urls[number % len(urls)]) as client:
                        text, end = chat(client, messages, max_tokens=40, session=session)
                messages.append({"role": "assistant", "content": text})
                self.ends.append(end)
            self.rounds.append(messages)
