"""/v1/sessions: conversations are listed, forked and deleted."""

from concurrent.futures import ThreadPoolExecutor, wait

import pytest
from fastapi.testclient import TestClient

from ragkv.api.answers import title_from

from .helpers import FACTS, engine_of, service_of

ASKED = {
    "question": "Who built the harbour of Oro, and who built the mill of Oro, if anybody knows?"
}


def talk(client: TestClient, session_id: str = "s", turns: int = 2) -> None:
    client.post("/v1/collections", json={"name": "default"})
    for _ in range(turns):
        assert client.post("/v1/ask", json={**ASKED, "session_id": session_id}).status_code == 200


def flush(client: TestClient) -> None:
    engine_of(client.app).flush()


def test_a_forked_conversation_continues_independently(client: TestClient) -> None:
    talk(client)
    copy = client.post("/v1/sessions/s/fork", json={"to": "t"})
    assert (copy.status_code, copy.json()["turns"]) == (201, 2)
    talk(client, "t", turns=1)
    assert [client.get(f"/v1/sessions/{name}").json()["turns"] for name in "st"] == [2, 3]
    client.delete("/v1/sessions/s")
    talk(client, "t", turns=1)
    named = client.post("/v1/sessions/t/fork", json={}).json()["id"]
    assert client.get(f"/v1/sessions/{named}").json()["turns"] == 4


def test_a_turn_is_asked_again_in_its_own_conversation(client: TestClient) -> None:
    talk(client)
    rewound = client.post("/v1/sessions/s/rewind", json={})
    assert (rewound.status_code, rewound.json()["turns"]) == (200, 1)
    talk(client, turns=1)
    assert client.post("/v1/sessions/s/rewind", json={"turns": 2}).json()["turns"] == 0
    talk(client, turns=1)
    assert [one["id"] for one in client.get("/v1/sessions").json()["data"]] == ["s"]


def test_a_deletion_during_the_first_turn_waits_for_it_and_deletes_it(client: TestClient) -> None:
    client.get("/v1/sessions")  # opens the tenant
    tenant = service_of(client.app).tenants.opened()[""]
    session = tenant.session("s")
    with ThreadPoolExecutor() as pool:
        with session.held():  # as its first turn does
            deleting = pool.submit(client.delete, "/v1/sessions/s")
            wait([deleting], timeout=0.5)
            assert not deleting.done()
        assert deleting.result().status_code == 200
    assert session.deleted
    assert client.delete("/v1/sessions/s").status_code == 404


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("s/fork", {"to": "s"}, 409),
        ("s/fork", {"to": "a/b"}, 400),
        ("gone/fork", {}, 404),
        ("s/rewind", {"turns": 2}, 400),
        ("s/rewind", {"turns": 0}, 400),
        ("gone/rewind", {}, 404),
    ],
)
def test_a_wrong_session_request_is_refused_and_changes_nothing(
    client: TestClient, path: str, body: object, status: int
) -> None:
    talk(client, turns=1)
    assert client.post(f"/v1/sessions/{path}", json=body).status_code == status
    assert client.get("/v1/sessions/s").json()["turns"] == 1


def test_unnamed_sessions_cannot_be_reached_by_name(client: TestClient) -> None:
    body = {"model": "reader", "messages": [{"role": "user", "content": FACTS[0]}]}
    client.post("/v1/chat/completions", json=body)
    engine = engine_of(client.app)
    (found,) = engine.sessions.ids()
    assert client.get(f"/v1/sessions/{found}").status_code == 404
    assert client.delete(f"/v1/sessions/{found}").status_code == 404


def test_a_conversation_is_titled_by_its_first_question(client: TestClient) -> None:
    talk(client, turns=1)
    client.post("/v1/ask", json={"question": "And the mill?", "session_id": "s"})
    client.post("/v1/sessions/s/fork", json={"to": "t"})
    titles = {one["id"]: one["title"] for one in client.get("/v1/sessions").json()["data"]}
    assert titles == {
        "s": "Who built the harbour of Oro, and who built the mill of Oro, if anybody knows?"
    } | {"t": titles["s"]}


@pytest.mark.parametrize(
    ("question", "title"),
    [
        ("  Who\r\n built\tit?\x00\x1b[31m ", "Who built it? [31m"),
        ("Who \u202ebuilt\u2066 it\u200b?", "Who built it ?"),
        ("<b>Who</b>", "<b>Who</b>"),
        ("Wer " * 100, ("Wer " * 19 + "Wer")[:79] + "…"),
        ("🦊" * 81, "🦊" * 79 + "…"),
        ("\u200b", ""),
    ],
)
def test_a_title_is_one_line_of_visible_characters(question: str, title: str) -> None:
    assert title_from(question) == title and len(title) <= 80
