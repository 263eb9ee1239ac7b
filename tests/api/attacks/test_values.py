"""Values that no client should send, what they may do to metrics and files, and the API page's own
example.
"""

import inspect
import json
import os
import stat
import threading
import time
import timeit
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, get_args

import pytest
from fastapi.routing import APIRoute
from fastapi.testclient import TestClient

from ragkv import Engine
from ragkv.api.bodies.parts import Strict
from ragkv.api.call import ApiCallDep
from ragkv.api.keys import ANONYMOUS, KeyFile
from ragkv.api.middleware import ANSWER_PATHS, count_values
from ragkv.api.routes import ROUTERS
from ragkv.api.settings import LimitsConfig, QueueConfig
from ragkv.api.tenants import Tenant
from ragkv.chat.chat_template import Template
from ragkv.runtime import Check
from ragkv.scheduling import Scheduler
from tests.api.helpers import app_on, client_of, filled, service_of

JSON = {"content-type": "application/json"}
ASK = {"question": "x", "collection": "facts", "max_tokens": 1}
CHAT: dict[str, Any] = {
    "model": "reader",
    "messages": [{"role": "user", "content": "x"}],
    "max_tokens": 1,
}
ASKED = (("/v1/ask", ASK), ("/v1/chat/completions", CHAT))
MANY_KEYS = {f"k{number}": 1 for number in range(3000)}


def best_s(work: Callable[[], object]) -> float:
    """The processor time of the fastest of five."""
    return min(timeit.repeat(work, number=1, repeat=5, timer=time.thread_time))


def nested(levels: int) -> str:
    return "[" * levels + "1" + "]" * levels


ODD_BODIES = [
    ("/v1/collections/facts/search", '{"query": "x", "filter": {"a": NaN}}'),
    ("/v1/collections/facts/search", '{"query": "x", "filter": {"a": 1e999}}'),
    ("/v1/collections/facts/search", '{"query": "x", "filter": {"a": ' + "9" * 5000 + "}}"),
    ("/v1/collections/facts/search", '{"query": "x", "filter": {"a": ' + nested(300) + "}}"),
    ("/v1/collections/facts/search", '{"query": "x", "filter": {"a": ' + nested(980) + "}}"),
    ("/v1/collections/facts/search", '{"query": "x", "filter": {"\\ud800": 1}}'),
    ("/v1/collections/facts/search", json.dumps({"query": "x", "retriever": "y" * 5000})),
    ("/v1/collections", json.dumps({"name": "a\n"})),
    ("/v1/collections", '{"name": "\\ud800"}'),
    (
        "/v1/collections/facts/documents",
        '{"documents": [{"text": "t", "metadata": {"k\\u0000": 1}}]}',
    ),
    (
        "/v1/collections/facts/documents",
        '{"documents": [{"text": "t", "metadata": {"k": "a\\u0000b"}}]}',
    ),
    (
        "/v1/collections/facts/documents",
        '{"documents": [{"text": "t", "metadata": {"k": "\\ud800"}}]}',
    ),
    ("/v1/collections/facts/documents", '{"documents": [{"text": "a\\u0000b"}]}'),
    (
        "/v1/collections/facts/documents",
        '{"documents": [{"text": "t", "metadata": {"k": ' + nested(100) + "}}]}",
    ),
    ("/v1/collections/facts/documents", '{"documents": [{"text": "t", "metadata": {"k": 1e999}}]}'),
    (
        "/v1/collections/facts/documents",
        json.dumps({"documents": [{"text": "t", "metadata": {"k": "x" * 30_000}}]}),
    ),
    ("/v1/collections/facts/documents", json.dumps({"documents": [{"id": "a\n", "text": "t"}]})),
    ("/v1/ask", json.dumps({**ASK, "u" * 100_000: 1})),
    ("/v1/ask", json.dumps({**ASK, **MANY_KEYS})),
    ("/v1/ask", json.dumps({**ASK, "session_id": "a\n"})),
    ("/v1/chat/completions", json.dumps({**CHAT, "seed": 10**40})),
    ("/v1/chat/completions", json.dumps({**CHAT, "n": 10**400})),
    ("/v1/chat/completions", json.dumps({**CHAT, "messages": [1] * 100_000})),
    ("/v1/embeddings", json.dumps({"model": "hash", "input": [""] * 100_000})),
    ("/v1/embeddings", json.dumps({"model": "hash", "input": "x", "dimensions": 10**40})),
]


CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"a": "\\udc00"}'}}
ODD_BODIES += [
    ("/api/show", '{"model": "\\ud800"}'),
    ("/api/show", '{"name": "reader", "x": ["\\udfff"]}'),
    ("/api/show", "[]"),
    (
        "/v1/chat/completions",
        json.dumps({**CHAT, "messages": [{"role": "assistant", "tool_calls": [CALL]}]}),
    ),
    ("/api/chat", '{"model": "reader", "messages": [{"role": "user", "content": "\\ud83d"}]}'),
    ("/api/generate", '{"model": "reader", "prompt": "x", "options": {"\\ud83d": 1}}'),
    ("/v1/chat/completions", json.dumps({**CHAT, "user": "\ud800x"})),
    ("/v1/chat/completions", json.dumps({**CHAT, "metadata": {"a": "\udfff"}})),
]


@pytest.fixture(scope="module")
def up(reader: Engine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    """A client of a server with two documents; an error of the server is a response, not an
    exception.
    """
    app = app_on(reader, tmp_path_factory.mktemp("home"))
    with client_of(app) as client:
        filled(client)
        yield TestClient(app, base_url="http://localhost", raise_server_exceptions=False)


@pytest.mark.parametrize(
    ("where", "names"),
    [
        (MANY_KEYS, "3000 conditions; at most 256"),
        ({f"k{number}": 1 for number in range(300)}, "300 conditions; at most 256"),
        ({"a\0b": 1}, "NUL"),
        ({"a": "x\0y"}, "NUL"),
        ({"a": ["x\0y"]}, "NUL"),
        ({"k" * 5000: 1}, "5000 characters; at most 256"),
        ({"a": 10**30}, "compares with"),
    ],
)
@pytest.mark.parametrize(
    "path", ["/v1/collections/facts/search", "/v1/ask", "/v1/chat/completions"]
)
def test_a_filter_that_is_too_large_gets_400_that_names_the_limit(
    up: TestClient, path: str, where: Any, names: str
) -> None:
    bodies: dict[str, Any] = {
        "/v1/collections/facts/search": {"query": "x", "filter": where},
        "/v1/ask": {**ASK, "filter": where},
        "/v1/chat/completions": {**CHAT, "rag": {"collection": "facts", "filter": where}},
    }
    response = up.post(path, json=bodies[path])
    assert response.status_code == 400, response.text
    message = response.json()["error"]["message"]
    assert names in message and len(message) < 1000


def test_messages_far_above_the_context_are_not_rendered(
    up: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Template, "render", None)
    long = up.post(
        "/v1/chat/completions",
        json={**CHAT, "messages": [{"role": "user", "content": "x " * 45_000}] * 3},
    )
    assert (long.status_code, long.json()["error"]["code"]) == (400, "context_length_exceeded")


def test_a_prompt_waits_until_another_one_of_its_tenant_is_prepared(
    reader: Engine, tmp_path: Path
) -> None:
    with client_of(app_on(reader, tmp_path, queue=QueueConfig(deadline_s=0.2))) as client:
        filled(client)
        with service_of(client.app).tenants.use(ANONYMOUS) as tenant:  # type: ignore[arg-type]
            tenant._preparing = threading.Semaphore(0)
            asked = client.post("/v1/ask", json=ASK), client.post("/v1/chat/completions", json=CHAT)
    assert [one.status_code for one in asked] == [504, 504]


def test_a_chat_that_waits_for_the_first_reading_of_passages_holds_up_no_other_request(
    reader: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answered: list[int] = []

    def first_reading(*_: object) -> tuple[str, ...]:
        answered.append(client.post("/v1/ask", json=ASK).status_code)
        return ()

    queue = QueueConfig(deadline_s=30.0)
    with client_of(app_on(reader, tmp_path, queue=queue)) as client:
        filled(client)
        with service_of(client.app).tenants.use(ANONYMOUS) as tenant:  # type: ignore[arg-type]
            tenant._preparing = threading.Semaphore(1)
        monkeypatch.setattr(Tenant, "unread_passages", first_reading)
        assert client.post("/v1/chat/completions", json=CHAT).status_code == 200
    assert answered == [200]


def test_a_prompt_waits_for_room_at_the_model(
    up: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits = list[Check]()
    monkeypatch.setattr(Scheduler, "wait_for_room", lambda _, check: waits.append(check))
    assert [up.post(path, json=body).status_code for path, body in ASKED] == [200, 200] and len(
        waits
    ) == 2


def test_a_full_queue_refuses_before_it_parses(
    up: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    def answered() -> list[int]:
        return [up.post(path, content="{", headers=JSON).status_code for path in ANSWER_PATHS]

    assert answered() == [400] * 4
    monkeypatch.setattr(service_of(up.app).answer_pool, "_closed", True)  # type: ignore[arg-type]
    assert answered() == [503] * 4


@pytest.mark.parametrize(("path", "body"), ODD_BODIES, ids=range(len(ODD_BODIES)))
def test_an_odd_value_gets_400_with_a_short_message(up: TestClient, path: str, body: str) -> None:
    response = up.post(path, content=body.encode(), headers=JSON)
    too_many = count_values(body.encode()) > LimitsConfig().json_values
    assert response.status_code == (413 if too_many else 400), response.text[:500]
    assert too_many == ("limits.json_values" in response.text)
    assert len(response.text) < 2000


def test_every_body_of_json_is_checked_by_the_one_base_of_all_bodies() -> None:
    bodies = {
        route.path: route.body_field.field_info.annotation
        for router in ROUTERS
        for route in router.routes
        if isinstance(route, APIRoute) and route.body_field is not None
    }
    assert "/api/show" in bodies
    assert {path for path, body in bodies.items() if not issubclass(body, Strict)} == set()


@pytest.mark.parametrize("end", ["%0a", "%0A%0d", "%00", "%ff", "%c3", "%7f", "%ed%a0%80"])
@pytest.mark.parametrize("path", ["/v1/collections/facts", "/v1/collections/facts/documents/0"])
def test_a_path_names_what_it_says_or_nothing(up: TestClient, path: str, end: str) -> None:
    before = up.get("/v1/collections/facts/documents").json()
    assert up.delete(f"{path}{end}").status_code == 400
    assert up.get(f"{path}{end}").status_code == 400
    assert up.get("/v1/collections/facts/documents").json() == before


@pytest.mark.parametrize("name", ["reader:none", "reader:facts\n", "reader:../facts", "reader:"])
def test_a_model_of_a_collection_that_is_not_there_is_not_shown(up: TestClient, name: str) -> None:
    assert up.post("/api/show", json={"model": name}).status_code == 404
    assert up.post("/api/show", json={"model": "reader:facts"}).status_code == 200


@contextmanager
def umask(mask: int) -> Iterator[None]:
    old = os.umask(mask)
    try:
        yield
    finally:
        os.umask(old)


@pytest.mark.parametrize("mask", [0o000, 0o022, 0o077])
def test_folders_under_a_home_are_the_owners_alone_whatever_the_umask(
    reader: Engine, tmp_path: Path, mask: int
) -> None:
    home = tmp_path / "above" / "home"
    with umask(mask):
        secret, _ = KeyFile(home / "keys.json").add("me")
        with client_of(app_on(reader, home), secret) as client:
            filled(client)
            assert client.post("/v1/ask", json={**ASK, "session_id": "s"}).status_code == 200
    modes = {
        path: stat.S_IMODE(path.stat().st_mode) for path in (home.parent, home, *home.rglob("*"))
    }
    assert {
        path: oct(mode) for path, mode in modes.items() if path.is_dir() and mode != 0o700
    } == {}
    private = ("keys.json", "keys.json.lock", "index.sqlite")
    assert {
        path.name: oct(mode)
        for path, mode in modes.items()
        if path.name in private and mode & 0o077
    } == {}


def test_a_symbolic_link_is_no_collection_and_is_never_followed_by_a_deletion(
    reader: Engine, tmp_path: Path
) -> None:
    home = tmp_path / "home"
    other = tmp_path / "other"
    with client_of(app_on(reader, home)) as client:
        filled(client, "real")
    with client_of(app_on(reader, other)) as client:
        filled(client, "facts")
    (home / "collections" / "link").symlink_to(other / "collections" / "facts")
    (home / "collections" / ".deleted-0").symlink_to(other / "collections" / "facts")
    with client_of(app_on(reader, home)) as client:
        assert [one["name"] for one in client.get("/v1/collections").json()["data"]] == ["real"]
        assert client.get("/v1/collections/link").status_code == 404
        assert client.delete("/v1/collections/link").status_code == 404
    with client_of(app_on(reader, other)) as client:
        assert client.get("/v1/collections/facts").json()["documents"] == 2


def test_large_text_is_checked_in_less_than_half_the_time_in_which_python_writes_it() -> None:
    messages = [{"role": "user", "content": "harbour mill " * 7000} for _ in range(40)]

    class Body(Strict):
        messages: list[Any]

    body = {"messages": messages}
    assert (
        best_s(lambda: Body.model_validate(body))
        < best_s(lambda: json.dumps(body, ensure_ascii=False)) / 2
    )


def test_what_every_route_depends_on_is_a_coroutine_so_it_waits_for_no_thread() -> None:
    assert inspect.iscoroutinefunction(get_args(ApiCallDep)[1].dependency)
