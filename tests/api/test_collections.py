"""Collections: stored documents are found, deleted ones leave nothing behind, tenants are
separate.
"""

import json
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from ragkv import Engine
from ragkv.api.answers import AnswerJob
from ragkv.api.documents.collections import Collections
from ragkv.api.documents.upload_parsing import Parsed
from ragkv.api.keys import ANONYMOUS, KeyFile
from ragkv.api.settings import LimitsConfig
from ragkv.api.tenants import Tenant
from ragkv.errors import CancelledError, DeadlineError
from ragkv.rag import Corpus, Rag
from ragkv.retrieval import Document, IngestReport
from ragkv.runtime import Check, no_check
from ragkv.scheduling.encoding import BackgroundEncoder
from tests.retrieval.fakes import HashEmbedder

from .helpers import FACTS, app_on, client_of, engine_of, entries, filled, service_of, wait_until

PATHS = "/v1/collections/facts/documents"


def upload(client: TestClient, name: str, data: bytes) -> Any:
    return client.post(PATHS, files=[("files", (name, data))])


def test_collections_can_be_created_listed_shown_and_deleted(client: TestClient) -> None:
    assert client.get("/v1/collections").json()["data"] == []
    made = client.post("/v1/collections", json={"name": "b"})
    assert (made.status_code, made.json()["documents"]) == (201, 0)
    again = client.post("/v1/collections", json={"name": "b"})
    assert again.status_code == 200 and again.json() == made.json()
    filled(client, "a")
    assert [one["name"] for one in client.get("/v1/collections").json()["data"]] == ["a", "b"]
    assert client.get("/v1/collections/a").json()["chunks"] == 2
    assert client.delete("/v1/collections/a").json() == {"id": "a", "deleted": True}
    assert (
        client.get("/v1/collections/a").status_code
        == client.delete("/v1/collections/a").status_code
        == 404
    )
    assert [one["name"] for one in client.get("/v1/collections").json()["data"]] == ["b"]


def test_an_unchanged_document_costs_nothing_and_a_changed_one_replaces_the_old(
    client: TestClient,
) -> None:
    filled(client)
    same = client.post(PATHS, json={"documents": [{"id": "0", "text": FACTS[0]}]}).json()
    nothing = {"encoded": 0, "present": 1, "failed": 0, "left": 0, "bytes_per_token": 2128}
    assert same["unchanged"] == ["0"] and same["chunks"] == nothing
    new = {"id": "0", "text": "The harbour of Oro is closed.", "metadata": {"lang": "en"}}
    put = client.post(PATHS, json={"documents": [new]}).json()
    assert put["changed"] == ["0"] and put["chunks"]["encoded"] == 1
    shown = client.get(f"{PATHS}/0").json()
    assert (shown["text"], shown["metadata"]) == ("The harbour of Oro is closed.", {"lang": "en"})
    assert entries(client) == 2  # the old text's entry was deleted


def test_an_uploaded_file_becomes_a_document_named_without_its_path(client: TestClient) -> None:
    client.post("/v1/collections", json={"name": "facts"})
    assert upload(client, "../../etc/passwd.md", b"# Title\nThe harbour.").json()["added"] == [
        "passwd.md"
    ]
    assert upload(client, "C:\\docs\\b.TXT", b"\xef\xbb\xbfPlain text.").json()["added"] == [
        "b.TXT"
    ]
    html = b"<html><head><title>Page</title></head><body><p>Words of a page.</p></body></html>"
    assert upload(client, "c.html", html).json()["added"] == ["c.html"]
    assert client.get(f"{PATHS}/c.html").json()["title"] == "Page"
    lines = (
        b'{"id": "x/1", "text": "First line."}\n{"text": "Second line.", "metadata": {"n": 2}}\n'
    )
    assert upload(client, "d.jsonl", lines).json()["added"] == ["d.jsonl/x/1", "d.jsonl/line 2"]
    assert client.get(f"{PATHS}/d.jsonl/x/1").json()["text"] == "First line."


@pytest.mark.parametrize(
    ("name", "data", "status"),
    [
        ("a.exe", b"x", 415),
        ("noname", b"\x7fELF\x00", 400),
        ("..", b"x", 400),
        ("a.txt", b"", 400),
        ("a.txt", b"\x00\x01", 400),
        ("a.txt", b"\xff\xfe\xfa", 400),
        ("a.jsonl", b"{", 400),
        ("a.pdf", b"not a pdf", 400),
        ("x" * 300 + ".txt", b"x", 400),
    ],
)
def test_an_unreadable_file_is_refused(
    client: TestClient, name: str, data: bytes, status: int
) -> None:
    client.post("/v1/collections", json={"name": "facts"})
    response = upload(client, name, data)
    assert response.status_code == status and "/tmp" not in response.text, response.text
    assert client.get("/v1/collections/facts").json()["documents"] == 0


def test_the_kv_of_a_text_is_deleted_with_the_last_collection_that_holds_it(
    client: TestClient,
) -> None:
    filled(client, "one")
    filled(client, "two", FACTS[:1])
    assert entries(client) == 2
    client.delete("/v1/collections/one/documents/0")
    assert entries(client) == 2  # `two` holds the text too
    client.delete("/v1/collections/two")
    assert entries(client) == 1
    client.delete("/v1/collections/one")
    assert entries(client) == 0


@pytest.mark.parametrize("path", ["/v1/ask", "/v1/chat/completions"])
@pytest.mark.parametrize(("told", "fails"), [(False, False), (True, False), (False, True)])
def test_an_answer_leaves_no_kv_of_a_text_that_was_deleted_meanwhile(
    client: TestClient, monkeypatch: pytest.MonkeyPatch, path: str, told: bool, fails: bool
) -> None:
    filled(client)
    collections = service_of(client.app).tenants.opened()[""].collections
    engine = engine_of(client.app)
    stream = AnswerJob.stream

    def delete_first(*given: Any, **more: Any) -> Any:
        """The passages are found; now their document is deleted, here or by another replica."""
        if told:
            monkeypatch.setattr(collections, "_delete_kv", lambda _: None)
        with collections.use("facts") as rag:
            collections.delete_documents(rag, ["0"])
        if told:
            monkeypatch.undo()
            engine.entries.delete(FACTS[:1])
            service_of(client.app).tenants.opened()[""].collections.delete_traces()
        if fails:  # behind its prefill, which has missed the passages
            answer = stream(*given, **more)
            yield next(answer)
            raise DeadlineError("The time is over.")
        yield from stream(*given, **more)

    monkeypatch.setattr(AnswerJob, "stream", delete_first)
    asked = {"question": "Who built the mill of Oro?", "collection": "facts", "max_tokens": 2}
    chat = {
        "model": "reader:facts",
        "messages": [{"role": "user", "content": "Who built the mill of Oro?"}],
        "max_tokens": 2,
    }
    response = client.post(path, json=asked if path == "/v1/ask" else chat)
    if fails:
        assert response.status_code == 504
    else:
        assert FACTS[0] in {source["text"] for source in report_of(response.json())["sources"]}
    engine.flush()
    assert engine.entries.lacking(FACTS[:1])[0], "its KV was stored again, and stayed"


def test_an_answer_waits_for_no_upload_to_drop_what_was_deleted_and_the_upload_drops_it(
    client: TestClient,
) -> None:
    filled(client)
    collections = service_of(client.app).tenants.opened()[""].collections
    engine = engine_of(client.app)
    with collections.use("facts") as rag:
        collections.delete_documents(rag, ["0"])
        engine.entries.encode(FACTS[:1])  # as an answer does that had found it

        def uploading() -> None:
            """An answer ends while an upload runs."""
            collections.delete_kv_of_deleted("facts", FACTS[:1])
            assert engine.entries.has(engine.chunk(FACTS[0]).token_ids)

        document = Document("new", "The ferry of Oro is blue.", "new")
        collections.ingest(rag, Parsed([document]), allow=uploading)
    assert not engine.entries.has(engine.chunk(FACTS[0]).token_ids)


def test_open_collections_keep_few_bytes_of_vectors_together(
    client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = service_of(client.app).tenants._collections

    def held() -> int:
        return sum(rag.index.texts.held_bytes for rag in pool.opened().values())

    def search(name: str) -> None:
        found = client.post(f"/v1/collections/{name}/search", json={"query": "mill"})
        assert len(found.json()["hits"]) == len(FACTS)

    for name in ("one", "two", "three"):
        filled(client, name)
    search("one")
    of_one = held()
    assert of_one > 0
    search("two")
    assert held() == 2 * of_one
    monkeypatch.setattr(pool, "_most_bytes", of_one)
    search("three")
    search("three")
    assert held() == of_one


def report_of(answer: Any) -> Any:
    return answer.get("ragkv", answer)


def test_the_next_start_finishes_a_deletion_that_a_kill_interrupted(
    reader: Engine, tmp_path: Path
) -> None:
    with client_of(app_on(reader, tmp_path)) as client:
        filled(client)
        filled(client, "kept", FACTS[:1])
    (tmp_path / "collections" / "facts").rename(tmp_path / "collections" / ".deleted-0123")
    with client_of(app_on(reader, tmp_path)) as client:
        assert entries(client) == 1
        assert [one["name"] for one in client.get("/v1/collections").json()["data"]] == ["kept"]
    assert [path.name for path in (tmp_path / "collections").iterdir()] == ["kept"]


def test_collections_sessions_and_kv_survive_a_restart(reader: Engine, tmp_path: Path) -> None:
    asked = {"question": "Who built the mill of Oro?", "collection": "facts", "session_id": "s"}
    with client_of(app_on(reader, tmp_path)) as client:
        filled(client)
        first = client.post("/v1/ask", json=asked).json()
    with client_of(app_on(reader, tmp_path)) as client:
        assert client.get("/v1/collections/facts").json()["documents"] == 2
        assert client.get("/v1/sessions/s").json()["turns"] == 1
        fresh = client.post("/v1/ask", json={**asked, "session_id": "t"}).json()
        assert fresh["answer"] == first["answer"] and fresh["reuse"]["missed_chunks"] == 0
        # a new process has read it, perhaps ahead
        assert sum(fresh["reuse"]["bytes_by_tier"].values()) > 0


def test_the_next_start_computes_the_kv_that_an_interrupted_ingestion_left_out(
    reader: Engine, tmp_path: Path
) -> None:
    with client_of(app_on(reader, tmp_path)) as client:
        filled(client)
        filled(client, "other", FACTS[:1])
        engine_of(client.app).entries.delete(FACTS)  # as if the process had been killed before
        assert entries(client) == 0
    with client_of(app_on(reader, tmp_path)) as client:
        client.get("/v1/stats")  # opens the tenant
        wait_until(lambda: entries(client) == len(FACTS))


def test_deleting_a_text_deletes_unnamed_conversations(client: TestClient) -> None:
    filled(client)
    body = {
        "model": "reader",
        "messages": [{"role": "user", "content": f"{FACTS[0]} Who built it?"}],
    }
    client.post("/v1/chat/completions", json=body)
    engine = engine_of(client.app)
    assert engine.sessions.ids()
    client.delete("/v1/collections/facts/documents/0")
    engine.flush()
    assert engine.sessions.ids() == () and entries(client) == 1


# Tenants


@pytest.fixture
def two(reader: Engine, tmp_path: Path) -> Iterator[tuple[TestClient, TestClient]]:
    """Clients of two tenants of one server, of which one is open at a time."""
    file = KeyFile(tmp_path / "keys.json")
    first, _ = file.add("first", "alpha")
    second, _ = file.add("second", "beta")
    app = app_on(reader, tmp_path, open_tenants=1)
    with client_of(app, first) as one:
        yield one, client_of(app, second)


def test_an_idle_tenant_is_closed_for_the_next_and_opened_again(
    two: tuple[TestClient, TestClient],
) -> None:
    one, other = two
    tenants = service_of(one.app).tenants  # type: ignore[arg-type]
    filled(one)
    assert set(tenants.opened()) == {"alpha"}
    other.get("/v1/stats")
    assert set(tenants.opened()) == {"beta"}
    assert one.get("/v1/collections/facts").json()["documents"] == 2
    assert set(tenants.opened()) == {"alpha"}


def test_a_tenant_that_is_closed_for_another_computes_no_kv_that_waits(
    two: tuple[TestClient, TestClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = two
    filled(one)
    flushed = list[object]()
    monkeypatch.setattr(BackgroundEncoder, "flush", flushed.append)
    assert other.get("/v1/stats").status_code == 200 and flushed == []


@pytest.mark.parametrize("left", [(BackgroundEncoder, "busy"), (Collections, "resumes")])
def test_kv_that_waits_when_a_tenant_is_closed_is_computed_when_it_is_opened_again(
    two: tuple[TestClient, TestClient], monkeypatch: pytest.MonkeyPatch, left: tuple[type, str]
) -> None:
    one, other = two
    filled(one)
    tenants = service_of(one.app).tenants  # type: ignore[arg-type]
    tenants.opened()["alpha"].engine.entries.delete(FACTS)
    with monkeypatch.context() as patch:
        patch.setattr(*left, True)
        other.get("/v1/stats")
        wait_until(lambda: set(tenants.opened()) == {"beta"})
        one.get("/v1/stats")
    lacking = tenants.opened()["alpha"].engine.entries.lacking
    wait_until(lambda: not any(lacking(FACTS)))


def test_a_tenant_is_opened_without_a_thread_that_looks_for_kv_that_was_left_out(
    two: tuple[TestClient, TestClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ragkv.api.documents.collections.begun", lambda *_: None)
    for client in two:  # the first one is closed again
        assert client.get("/v1/collections").status_code == 200


def test_a_request_waits_for_the_place_of_another_tenant_until_its_deadline(
    two: tuple[TestClient, TestClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = two
    may_close = threading.Event()
    close = Tenant.close

    def close_later(tenant: Tenant) -> None:
        assert may_close.wait(60)
        close(tenant)

    assert one.get("/v1/collections").status_code == 200
    monkeypatch.setattr(Tenant, "close", close_later)
    monkeypatch.setattr(service_of(one.app).data_pool, "_deadline_s", 0.3)  # type: ignore[arg-type]
    assert other.get("/v1/collections").status_code == 504
    may_close.set()


def test_documents_ingested_on_the_command_line_are_the_default_collection(
    reader: Engine, tmp_path: Path
) -> None:
    with reader.with_config(service_of(app_on(reader, tmp_path)).config.engine) as engine:
        rag = Rag(Corpus(engine, tmp_path / "index", embedder=HashEmbedder()))
        rag.corpus.ingest([Document("d", FACTS[0])])
        rag.close()
    with client_of(app_on(reader, tmp_path)) as client:
        assert client.get("/v1/collections").json()["data"][0]["name"] == "default"
        assert (
            client.post("/v1/ask", json={"question": "harbour"}).json()["sources"][0]["text"]
            == FACTS[0]
        )
        filled(client, "index")  # the name of the folder in which the other one lies
        with (
            service_of(client.app).tenants.use(ANONYMOUS) as tenant,
            tenant.collections.use("default") as opened,
        ):
            client.get("/v1/collections/index/documents")
        with (
            service_of(client.app).tenants.use(ANONYMOUS) as tenant,
            tenant.collections.use("default") as again,
        ):
            assert again is opened
        client.delete("/v1/collections/index")
        client.delete("/v1/collections/default")
        assert (
            client.get("/v1/collections").json()["data"] == [] and not (tmp_path / "index").exists()
        )


class Late(HashEmbedder):
    """Has no time for a second batch."""

    late = True

    def embed_texts(
        self, texts: Sequence[str], check: Check = no_check, tenant: str = ""
    ) -> list[Any]:
        if self.late and self.embedded:
            raise DeadlineError("The deadline passed.")
        return super().embed_texts(texts, check, tenant)


def store(client: TestClient, count: int) -> Any:
    documents = [
        {"id": str(number), "text": f"The mill {number} is new."} for number in range(count)
    ]
    client.post("/v1/collections", json={"name": "facts"})
    return client.post(PATHS, json={"documents": documents})


def test_documents_whose_embedding_is_cut_are_not_stored_and_their_vectors_are_kept(
    reader: Engine, tmp_path: Path
) -> None:
    embedder = Late()
    with client_of(
        app_on(reader, tmp_path, embedder, limits=LimitsConfig(documents=100))
    ) as client:
        assert store(client, 100).json()["error"]["code"] == "deadline_exceeded"
        assert client.get("/v1/collections/facts").json()["documents"] == 0
        embedder.late = False
        assert store(client, 100).status_code == 201
        assert len(embedder.embedded) == 100  # the first batch was committed


def test_documents_are_stored_before_their_kv_and_the_answer_says_how_much_kv_is_left(
    client: TestClient,
) -> None:
    client.get("/v1/collections")
    with ThreadPoolExecutor(1) as pool:
        with engine_of(client.app).parts.scheduler.computing():  # no chunk can be computed
            stored = pool.submit(store, client, 60)
            wait_until(lambda: client.get("/v1/collections/facts").json().get("documents") == 60)
            service_of(client.app).cancel_all()
        body = stored.result().json()
    assert (
        len(body["added"]) == 60 == body["chunks"]["encoded"] + body["chunks"]["left"]
        and body["chunks"]["left"] > 0
    )


# before the batch of two passages; within its layers
@pytest.mark.parametrize("count", [3, 8])
def test_kv_that_a_cancelled_upload_leaves_is_not_computed_after_it(
    client: TestClient, count: int
) -> None:
    calls = iter(range(count))

    def check() -> None:
        if next(calls, None) is None:
            raise CancelledError("gone")

    store(client, 2)
    texts = [f"The mill {number} is new." for number in range(2)]
    with (
        service_of(client.app).tenants.use(ANONYMOUS) as tenant,
        tenant.collections.use("facts") as rag,
    ):
        assert tenant.engine.entries.delete(texts) == 2
        encoded = tenant.collections.encode("facts", rag, IngestReport(unchanged=("0", "1")), check)
        tenant.engine.flush()
        assert (
            next(calls, None) is None
            and len(tenant.engine.entries.lacking(texts)[0]) == 2 == encoded.left
        )


@pytest.mark.parametrize("id", [".", "..", "a/../b", "../a", "a/."])
def test_an_id_that_clients_resolve_to_another_address_is_refused(
    client: TestClient, id: str
) -> None:
    filled(client, "a")
    documents = [{"id": id, "text": FACTS[0]}]
    line = json.dumps({"id": id, "text": FACTS[0]}).encode()
    for sent in ({"json": {"documents": documents}}, {"files": [("files", ("a.jsonl", line))]}):
        refused = client.post("/v1/collections/a/documents", **sent)
        assert refused.status_code == 400 and "'.' or '..'" in refused.text, refused.text


def test_an_address_that_a_client_has_resolved_deletes_no_collection(client: TestClient) -> None:
    filled(client, "a")
    for resolved in ("/v1/collections/a/", "/v1/collections/a/documents/"):
        assert client.request("DELETE", resolved).status_code in (400, 404)
    assert client.get("/v1/collections/a").status_code == 200
