"""The parts of the front that need no Ray: inspection of requests, ASGI calls without a network, directories."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from starlette.types import Receive, Scope, Send

from ragkv.api import ServeConfig
from ragkv.api.documents.collection_folders import CollectionFolders
from ragkv.integrations.ray.forwarding import ForwardedRequest, ResponseStart, call_app
from ragkv.integrations.ray.replica_directory import ReplicaDirectory
from ragkv.integrations.ray.replica_routing import Parts
from ragkv.integrations.ray.request_inspector import RequestInspector
from ragkv.retrieval import Document, Index, Splitter

JSON = {"content-type": "application/json"}


@pytest.fixture
def inspector(tmp_path: Path) -> RequestInspector:
    return RequestInspector(ServeConfig(home=str(tmp_path)))


def inspect(inspector: RequestInspector, path: str, body: Any = None, **headers: str) -> Parts:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return inspector.inspect(path, {**JSON, **named}, b"" if body is None else json.dumps(body).encode())


def collection(home: Path, name: str, *texts: str) -> None:
    CollectionFolders(home).create(name, lambda _: None)
    with Index(home / "collections" / name, splitter=Splitter(lambda text: len(text.split()), 50)) as index:
        index.ingest([Document(f"d{number}", text) for number, text in enumerate(texts)])


def test_a_session_id_counts_the_same_in_path_header_and_body(inspector: RequestInspector) -> None:
    named = inspect(inspector, "/v1/ask", {"question": "q", "session_id": "s"})
    assert named and named == inspect(inspector, "/v1/ask", {"question": "other"}, x_session_id="s")
    assert named == inspect(inspector, "/v1/sessions/s") == inspect(inspector, "/v1/sessions/s/fork", {})
    assert named != inspect(inspector, "/v1/ask", {"question": "q", "session_id": "t"})
    assert named != inspect(inspector, "/v1/ask", {"session_id": "s"}, authorization="Bearer other")


def test_a_conversation_without_a_name_is_identified_by_its_first_messages(inspector: RequestInspector) -> None:
    first = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    later = [*first, {"role": "assistant", "content": "Hi."}, {"role": "user", "content": "And?"}]
    begun, continued = (inspect(inspector, "/v1/chat/completions", {"messages": m}) for m in (first, later))
    assert begun == continued != inspect(inspector, "/v1/chat/completions", {"messages": later[2:]})


def test_documents_in_a_request_are_identified_by_their_text(inspector: RequestInspector) -> None:
    body = {"messages": [], "documents": [{"text": "a" * 400}, {"text": "b"}]}
    parts = inspect(inspector, "/v1/chat/completions", body)
    assert [part.tokens for part in parts] == [101, 1]
    reordered = inspect(inspector, "/v1/chat/completions", {"messages": [], "documents": body["documents"][::-1]})
    assert reordered == parts[::-1]


def test_passages_are_searched_in_the_shared_index(inspector: RequestInspector, tmp_path: Path) -> None:
    collection(tmp_path, "docs", "Marl was founded by Enswyn.", "Wool is shorn in June.", "Enswyn plays the harp.")
    found = inspect(inspector, "/v1/ask", {"question": "Who is Enswyn?", "collection": "docs", "k": 2})
    assert len(found) == 2
    chat = {"messages": [{"role": "user", "content": "Who is Enswyn?"}], "rag": {"collection": "docs", "k": 2}}
    assert inspect(inspector, "/v1/chat/completions", chat)[1:] == found
    assert inspect(inspector, "/v1/ask", {"question": "Who is Enswyn?", "collection": "none"}) == ()
    (tmp_path / "collections" / "docs").rename(tmp_path / "deleted")
    assert inspect(inspector, "/v1/ask", {"question": "Who is Enswyn?", "collection": "docs"}) == ()


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b'{"messages": 3}', b'{"documents": [{}]}', b'{"question": "q", "k": "x"}', b"\xff"]
)
@pytest.mark.parametrize("path", ["/v1/ask", "/v1/chat/completions", "/"])
def test_inspecting_an_invalid_request_raises_no_error(
    inspector: RequestInspector, tmp_path: Path, path: str, body: bytes
) -> None:
    collection(tmp_path, "default", "The harp is old.")
    assert inspector.inspect(path, JSON, body) == ()


class App:
    """An ASGI application that responds in parts and records whether its client disconnected."""

    def __init__(self, parts: int, fails: bool = False) -> None:
        self.parts, self.fails, self.disconnected, self.received = parts, fails, asyncio.Event(), b""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.received = (await receive())["body"]
        try:
            await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/plain")]})
            for number in range(self.parts):
                await send({"type": "http.response.body", "body": b"%d" % number, "more_body": True})
            if self.fails:
                raise RuntimeError("half way")
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        except asyncio.CancelledError:
            self.disconnected.set()
            raise


def request(body: bytes = b"") -> ForwardedRequest:
    return ForwardedRequest("POST", "/x", b"/x", b"", ((b"host", b"here"),), body)


async def test_a_response_is_returned_in_its_parts() -> None:
    app = App(3)
    start, *parts = [part async for part in call_app(app, request(b"body"))]
    assert start == ResponseStart(200, ((b"content-type", b"text/plain"),))
    assert (parts, app.received) == ([b"0", b"1", b"2"], b"body")


async def test_closing_the_response_cancels_an_application_that_is_far_ahead() -> None:
    app = App(10_000)
    answer = call_app(app, request())
    assert isinstance(await anext(answer), ResponseStart)
    await answer.aclose()
    assert app.disconnected.is_set()


async def test_an_error_of_the_application_reaches_the_reader() -> None:
    with pytest.raises(RuntimeError, match="half way"):
        [part async for part in call_app(App(2, fails=True), request())]


def test_a_replica_directory_has_one_user_and_keeps_its_content_for_the_next(tmp_path: Path) -> None:
    first, second = ReplicaDirectory(tmp_path), ReplicaDirectory(tmp_path)
    assert first.path != second.path
    (first.path / "kv").mkdir()
    first.close()
    first.close()
    again = ReplicaDirectory(tmp_path)
    assert again.path == first.path and (again.path / "kv").is_dir()
    for directory in (second, again):
        directory.close()
