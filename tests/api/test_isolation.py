"""A tenant never sees another tenant's documents, conversations or entries, nor counts that reveal
them.
"""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from ragkv.api.documents.deletions import DeletionFollower
from ragkv.api.keys import Quota
from ragkv.config import MIB
from tests.faults import raising

from .whole import ask, documents, ingest, key, whole

QUESTION = "What is the job of Kiralus?"
SECRET = "The password of the vault in Zanzibar is heliotrope-9."


@pytest.fixture
def two_keys(tmp_path: Path) -> Iterator[tuple[TestClient, dict[str, str], dict[str, str]]]:
    """A client, and the headers of two keys of different tenants."""
    a = key(tmp_path, "a")
    b = key(tmp_path, "b")
    with whole(tmp_path) as client:
        yield client, a, b


TwoKeys = tuple[TestClient, dict[str, str], dict[str, str]]


def _chat(client: TestClient, headers: dict[str, str], text: str, **more: Any) -> Any:
    body = {
        "model": "reader",
        "messages": [{"role": "user", "content": "What is it?"}],
        "documents": [{"text": text}, {"text": "Kiralus signs letters as Gorax."}],
        "max_tokens": 4,
        **more,
    }
    response = client.post("/v1/chat/completions", json=body, headers=headers)
    assert response.status_code == 200, response.text
    return response.json()


def _counts(reuse: dict[str, Any]) -> dict[str, Any]:
    return {
        name: reuse[name]
        for name in ("exact", "fused", "recomputed", "computed", "missed_chunks", "bytes_by_tier")
    }


def _entries(client: TestClient, headers: dict[str, str]) -> list[int]:
    """The entries in each tier of the caller's store."""
    return [tier["entries"] for tier in client.get("/v1/stats", headers=headers).json()["tiers"]]


def _flush(client: TestClient) -> None:
    """Wait until the entries of missed chunks are stored."""
    app: Any = client.app
    for tenant in app.state.service.tenants.opened().values():
        tenant.engine.flush()


def test_another_tenants_collections_are_not_found(two_keys: TwoKeys) -> None:
    client, a, b = two_keys
    assert ingest(client, [{"id": "d", "text": SECRET}], b).status_code == 201
    assert client.get("/v1/collections", headers=a).json()["data"] == []
    for method, path, body in (
        ("GET", "/v1/collections/c", None),
        ("DELETE", "/v1/collections/c", None),
        ("GET", "/v1/collections/c/documents", None),
        ("GET", "/v1/collections/c/documents/d", None),
        ("DELETE", "/v1/collections/c/documents/d", None),
        ("POST", "/v1/collections/c/search", {"query": "vault"}),
        ("POST", "/v1/collections/c/documents", {"documents": [{"text": "x"}]}),
        ("POST", "/v1/ask", {"question": "vault", "collection": "c"}),
    ):
        theirs = client.request(method, path, json=body, headers=a)
        never = client.request(
            method,
            path.replace("/c", "/c-never", 1) if "/c/" in path else path,
            json=body,
            headers=a,
        )
        assert theirs.status_code == 404, (method, path, theirs.text)
        assert "heliotrope" not in theirs.text
        assert never.status_code == 404
    assert client.get("/v1/collections/c/documents/d", headers=b).json()["text"] == SECRET


def test_two_tenants_may_use_the_same_collection_name(two_keys: TwoKeys) -> None:
    client, a, b = two_keys
    ingest(client, [{"id": "d", "text": SECRET}], b)
    ingest(client, [{"id": "d", "text": "Nothing to see."}], a)
    hits = client.post(
        "/v1/collections/c/search", json={"query": "password vault"}, headers=a
    ).json()["hits"]
    assert [hit["text"] for hit in hits if "heliotrope" in hit["text"]] == []
    assert client.delete("/v1/collections/c", headers=a).status_code == 200
    assert client.get("/v1/collections/c/documents/d", headers=b).status_code == 200


def test_another_tenants_conversations_are_not_found(two_keys: TwoKeys) -> None:
    client, a, b = two_keys
    _chat(client, b, SECRET, session_id="s")
    assert client.get("/v1/sessions", headers=a).json()["data"] == []
    for method, path, body in (
        ("GET", "/v1/sessions/s", None),
        ("DELETE", "/v1/sessions/s", None),
        ("POST", "/v1/sessions/s/fork", {"to": "mine"}),
    ):
        assert client.request(method, path, json=body, headers=a).status_code == 404
    begun = _chat(client, a, "Nothing to see.", session_id="s")
    assert not [span for span in begun["ragkv"]["prompt"] if span["kind"] == "history"]
    assert client.get("/v1/sessions/s", headers=b).json()["turns"] == 1


def test_another_tenants_entry_is_never_a_hit_and_shows_in_no_count(two_keys: TwoKeys) -> None:
    client, a, b = two_keys
    first_b = _chat(client, b, SECRET)["ragkv"]["reuse"]
    _flush(client)
    second_b = _chat(client, b, SECRET)["ragkv"]["reuse"]
    assert (first_b["missed_chunks"], second_b["missed_chunks"]) == (2, 0)
    assert second_b["exact"] + second_b["fused"] > first_b["exact"] + first_b["fused"]
    first_a = _chat(client, a, SECRET)["ragkv"]["reuse"]
    assert _counts(first_a) == _counts(first_b)
    _flush(client)
    assert _counts(_chat(client, a, SECRET)["ragkv"]["reuse"]) == _counts(second_b)


def test_ingestion_by_one_tenant_evicts_nothing_of_another(tmp_path: Path) -> None:
    a = key(tmp_path, "a", quota=Quota(disk_bytes=2 * MIB, memory_bytes=1 * MIB))
    b = key(tmp_path, "b")
    with whole(tmp_path) as client:
        ingest(client, documents(3), b)
        assert not any(_entries(client, a))
        held = _entries(client, b)
        ingest(client, documents(), a)
        assert _entries(client, b) == held
        for tier in client.get("/v1/stats", headers=a).json()["tiers"]:
            assert tier["used_bytes"] <= tier["capacity_bytes"] <= 2 * MIB
        assert ask(client, QUESTION, a).status_code == 200


def test_quotas_for_documents_and_sessions_hold(tmp_path: Path) -> None:
    a = key(tmp_path, "a", quota=Quota(documents=3, sessions=2))
    docs = documents(5)
    with whole(tmp_path) as client:
        refused = ingest(client, docs, a)
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "quota_exceeded")
        assert client.get("/v1/collections/c", headers=a).json()["documents"] == 0
        assert ingest(client, docs[:3], a).status_code == 201
        assert ingest(client, docs[:3], a).status_code == 201  # no new document
        # the quota counts all collections
        assert ingest(client, docs[3:4], a, name="other").status_code == 403
        changed = [{**docs[0], "text": "Changed text."}]
        assert ingest(client, changed, a).status_code == 201  # still three documents
        client.delete(f"/v1/collections/c/documents/{docs[0]['id']}", headers=a)
        assert ingest(client, docs[3:4], a).status_code == 201
        for number in range(2):
            _chat(client, a, "x", session_id=f"s{number}")
        third = ask(client, QUESTION, a, session_id="s2")
        assert (third.status_code, third.json()["error"]["code"]) == (403, "quota_exceeded")
        assert ask(client, QUESTION, a, session_id="s1").status_code == 200
        assert client.post("/v1/sessions/s0/fork", json={}, headers=a).status_code == 403
        client.delete("/v1/sessions/s0", headers=a)
        assert ask(client, QUESTION, a, session_id="s2").status_code == 200


def _files_with(home: Path, *words: str) -> list[str]:
    held = {path: path.read_bytes() for path in sorted(home.rglob("*")) if path.is_file()}
    return [
        f"{path.relative_to(home)}: {word}"
        for path in held
        for word in words
        if word.encode() in held[path]
    ]


def test_a_deleted_document_leaves_no_text_and_no_entry(tmp_path: Path) -> None:
    a = key(tmp_path, "a")
    with whole(tmp_path) as client:
        ingest(
            client,
            [{"id": "d", "text": SECRET}, {"id": "e", "text": "Kiralus signs letters as Gorax."}],
            a,
        )
        found = ask(client, "What is the password of the vault?", a).json()
        assert any("heliotrope" in source["text"] for source in found["sources"])
        assert client.delete("/v1/collections/c/documents/d", headers=a).status_code == 200
        _flush(client)
        assert _entries(client, a)[-1] == 1  # on disk, of the other document
        assert client.get("/v1/collections/c/documents/d", headers=a).status_code == 404
        gone = ask(client, "What is the password of the vault?", a).json()
        assert not any("heliotrope" in source["text"] for source in gone["sources"])
        assert _files_with(tmp_path, "heliotrope", "Zanzibar") == []
        ingest(client, [{"id": "d", "text": SECRET}], a, name="whole")
        assert client.delete("/v1/collections/whole", headers=a).status_code == 200
        _flush(client)
        assert _files_with(tmp_path, "heliotrope", "Zanzibar") == []
        assert _entries(client, a)[-1] == 1


def test_a_deleted_conversation_leaves_no_history_and_no_kv(tmp_path: Path) -> None:
    a = key(tmp_path, "a")
    with whole(tmp_path) as client:
        _chat(client, a, SECRET, session_id="s")
        _flush(client)
        before = _entries(client, a)[-1]
        assert client.delete("/v1/sessions/s", headers=a).status_code == 200
        _flush(client)
        assert client.get("/v1/sessions/s", headers=a).status_code == 404
        assert _entries(client, a)[-1] < before
        again = _chat(client, a, SECRET, session_id="s")
        assert not [span for span in again["ragkv"]["prompt"] if span["kind"] == "history"]
    with whole(tmp_path) as client:
        assert client.get("/v1/sessions/s", headers=a).json()["turns"] == 1


def test_a_tenant_stays_closed_while_the_system_has_no_thread_for_its_deletions(
    two_keys: TwoKeys, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, a, _ = two_keys
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name == "ragkv-deletions":
            raise RuntimeError("can't start new thread")
        start(thread)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        refused = client.get("/v1/collections", headers=a)
    assert (refused.status_code, refused.headers["Retry-After"]) == (503, "1")
    assert "no thread" in refused.json()["error"]["message"]
    assert client.get("/v1/collections", headers=a).status_code == 200


def test_a_tenant_that_could_not_be_opened_is_opened_by_the_next_request(
    two_keys: TwoKeys, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, a, _ = two_keys
    with monkeypatch.context() as patch:
        patch.setattr(DeletionFollower, "start", raising(RuntimeError("can't start new thread")))
        assert client.get("/v1/collections", headers=a).status_code == 500
    assert client.get("/v1/collections", headers=a).status_code == 200
