"""What the front does before Ray comes in: what a request will read, the service called without a network, places."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.types import Receive, Scope, Send

from ragkv.api import ServeConfig
from ragkv.cluster.asks import Asks
from ragkv.cluster.passing import Passed, Start, answered
from ragkv.cluster.place import Place
from ragkv.retrieval import Document, Index, Splitter
from ragkv.scheduling.replica_routing import RoutingRequest

JSON = {"content-type": "application/json"}


@pytest.fixture
def asks(tmp_path: Path) -> Iterator[Asks]:
    made = Asks(ServeConfig(home=str(tmp_path)))
    yield made
    made.close()


def told(asks: Asks, path: str, body: Any = None, **headers: str) -> RoutingRequest:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return asks.of(path, {**JSON, **named}, b"" if body is None else json.dumps(body).encode())


def collection(home: Path, name: str, *texts: str) -> None:
    with Index(home / "collections" / name, splitter=Splitter(lambda text: len(text.split()), 50)) as index:
        index.ingest([Document(f"d{number}", text) for number, text in enumerate(texts)])


def test_a_conversation_is_the_same_wherever_it_is_named(asks: Asks) -> None:
    named = told(asks, "/v1/ask", {"question": "q", "session_id": "s"})
    assert named.session and named == told(asks, "/v1/ask", {"question": "other"}, x_session_id="s")
    assert named.session == told(asks, "/v1/sessions/s").session == told(asks, "/v1/sessions/s/fork", {}).session
    assert named.session != told(asks, "/v1/ask", {"question": "q", "session_id": "t"}).session
    assert named.session != told(asks, "/v1/ask", {"session_id": "s"}, authorization="Bearer other").session


def test_a_conversation_without_a_name_is_known_by_how_it_begins(asks: Asks) -> None:
    first = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    later = [*first, {"role": "assistant", "content": "Hi."}, {"role": "user", "content": "And?"}]
    begun, gone_on = (told(asks, "/v1/chat/completions", {"messages": m}).session for m in (first, later))
    assert begun == gone_on != told(asks, "/v1/chat/completions", {"messages": later[2:]}).session


def test_documents_that_come_along_are_known_by_their_text(asks: Asks) -> None:
    body = {"messages": [], "documents": [{"text": "a" * 400}, {"text": "b"}]}
    parts = told(asks, "/v1/chat/completions", body).parts
    assert [part.tokens for part in parts] == [101, 1]
    turned = told(asks, "/v1/chat/completions", {"messages": [], "documents": body["documents"][::-1]}).parts
    assert turned == parts[::-1]


def test_passages_are_looked_for_in_the_shared_index(asks: Asks, tmp_path: Path) -> None:
    collection(tmp_path, "docs", "Marl was founded by Enswyn.", "Wool is shorn in June.", "Enswyn plays the harp.")
    found = told(asks, "/v1/ask", {"question": "Who is Enswyn?", "collection": "docs", "k": 2})
    assert len(found.parts) == 2
    chat = {"messages": [{"role": "user", "content": "Who is Enswyn?"}], "rag": {"collection": "docs", "k": 2}}
    assert told(asks, "/v1/chat/completions", chat).parts[1:] == found.parts
    assert told(asks, "/v1/ask", {"question": "Who is Enswyn?", "collection": "none"}).parts == ()


def test_a_collection_made_anew_is_seen(asks: Asks, tmp_path: Path) -> None:
    def ask() -> tuple[Any, ...]:
        return told(asks, "/v1/ask", {"question": "harp", "collection": "docs", "k": 1}).parts

    collection(tmp_path, "docs", "The harp is old.")
    before = ask()
    (tmp_path / "collections" / "docs").rename(tmp_path / "grave")
    assert ask() == ()
    collection(tmp_path, "docs", "The harp is new.")
    assert ask() and ask() != before


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b'{"messages": 3}', b'{"documents": [{}]}', b'{"question": "q", "k": "x"}', b"\xff"]
)
@pytest.mark.parametrize("path", ["/v1/ask", "/v1/chat/completions", "/"])
def test_whatever_is_sent_no_request_fails_for_it(asks: Asks, tmp_path: Path, path: str, body: bytes) -> None:
    collection(tmp_path, "default", "The harp is old.")
    assert asks.of(path, JSON, body).session == ""


class App:
    """An ASGI application that answers in parts and notes whether it was left."""

    def __init__(self, parts: int, fails: bool = False) -> None:
        self.parts, self.fails, self.left, self.got = parts, fails, asyncio.Event(), b""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.got = (await receive())["body"]
        try:
            await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/plain")]})
            for number in range(self.parts):
                await send({"type": "http.response.body", "body": b"%d" % number, "more_body": True})
            if self.fails:
                raise RuntimeError("half way")
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        except asyncio.CancelledError:
            self.left.set()
            raise


def passed(body: bytes = b"") -> Passed:
    return Passed("POST", "/x", b"/x", b"", ((b"host", b"here"),), body)


async def test_an_answer_is_handed_back_in_its_parts() -> None:
    app = App(3)
    start, *parts = [part async for part in answered(app, passed(b"body"))]
    assert start == Start(200, ((b"content-type", b"text/plain"),))
    assert (parts, app.got) == ([b"0", b"1", b"2"], b"body")


async def test_who_leaves_ends_the_work_though_it_is_far_ahead() -> None:
    app = App(10_000)
    answer = answered(app, passed())
    assert isinstance(await anext(answer), Start)
    await answer.aclose()
    assert app.left.is_set()


async def test_what_fails_half_way_fails_for_its_reader() -> None:
    with pytest.raises(RuntimeError, match="half way"):
        [part async for part in answered(App(2, fails=True), passed())]


def test_a_place_is_one_process_s_and_the_next_one_finds_what_was_left(tmp_path: Path) -> None:
    first, second = Place(tmp_path), Place(tmp_path)
    assert first.path != second.path
    (first.path / "kv").mkdir()
    first.close()
    first.close()
    again = Place(tmp_path)
    assert again.path == first.path and (again.path / "kv").is_dir()
    for place in (second, again):
        place.close()
