"""A disk that is full: what is deleted is gone, stored KV makes room, and what cannot be done is
said.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from ragkv import Engine, EngineConfig, StoreConfig
from ragkv.api.keys import ANONYMOUS
from ragkv.config import MIB
from ragkv.store.limits import StoreLimits
from tests.api.helpers import app_on, client_of, engine_of
from tests.scheduling.helpers import until
from tests.small_disk import fill, small_disk

CONFIG = EngineConfig(store=StoreConfig(memory_bytes=0, disk_bytes=100 * MIB))
WORDS = "The harbour of Oro was built by Lena Moss, who had a mill and {} boats. "


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path / "small", "24m") as place:
        yield place


def stored(client: TestClient, name: str, count: int = 3) -> list[Any]:
    """Documents in a collection of that name, with KV; returns the keys of the KV."""
    texts = [
        "".join(WORDS.format(f"{name} {number} {n}") for n in range(5)) for number in range(count)
    ]
    assert client.post("/v1/collections", json={"name": name}).status_code == 201
    documents = [{"id": f"{number}", "text": text} for number, text in enumerate(texts)]
    sent = client.post(f"/v1/collections/{name}/documents", json={"documents": documents})
    assert sent.status_code == 201, sent.text
    engine = engine_of(client.app)
    engine.flush()
    with client.app.state.service.tenants.use(ANONYMOUS) as tenant:  # type: ignore[attr-defined]
        passages = set(tenant.collections.folders.texts(tenant.collections.folders.key(name).path))
    return engine.entries.keys([engine.chunk(text) for text in passages])


def on_disk(client: TestClient, keys: list[Any]) -> int:
    return sum(map(engine_of(client.app).parts.store.contains, keys))


def delete_document(client: TestClient) -> int:
    return client.delete("/v1/collections/one/documents/0").status_code


def delete_collection(client: TestClient) -> int:
    return client.delete("/v1/collections/one").status_code


def delete_conversation(client: TestClient) -> int:
    return client.delete("/v1/sessions/s").status_code


def upload(client: TestClient) -> int:
    body = {"documents": [{"id": "new", "text": WORDS.format("new") * 200}]}
    return client.post("/v1/collections/one/documents", json=body).status_code


def create(client: TestClient) -> int:
    return client.post("/v1/collections", json={"name": "third"}).status_code


@pytest.mark.parametrize(
    ("act", "status"),
    [
        (delete_document, 200),
        (delete_collection, 200),
        (delete_conversation, 200),
        (upload, 201),
        (create, 201),
    ],
)
def test_on_a_full_disk_deletions_are_made_and_kv_gives_way_to_documents(
    reader: Engine, disk: Path, act: Callable[[TestClient], int], status: int
) -> None:
    with client_of(app_on(reader, disk / "home", engine=CONFIG)) as client:
        gone = stored(client, "one")
        stored(client, "two")
        asked = {"question": "Who?", "collection": "one", "session_id": "s", "max_tokens": 1}
        assert client.post("/v1/ask", json=asked).status_code == 200
        engine_of(client.app).flush()
        fill(disk)
        assert act(client) == status
        assert client.get("/readyz").status_code == 200
        if act is delete_collection:
            assert on_disk(client, gone) == 0
            assert not list((disk / "home" / "collections").glob(".deleted-*"))


@pytest.mark.parametrize("act", [delete_document, delete_collection, delete_conversation])
def test_on_a_full_disk_without_kv_deletions_have_a_reserve_and_uploads_have_none(
    reader: Engine,
    disk: Path,
    monkeypatch: pytest.MonkeyPatch,
    act: Callable[[TestClient], int],
) -> None:
    with client_of(app_on(reader, disk / "home", engine=CONFIG)) as client:
        gone = stored(client, "one")
        asked = {"question": "Who?", "collection": "one", "session_id": "s", "max_tokens": 1}
        assert client.post("/v1/ask", json=asked).status_code == 200
        engine = engine_of(client.app)
        engine.flush()
        reserve = disk / "home" / "reserve"
        fill(disk)
        monkeypatch.setattr(StoreLimits, "free_disk", lambda _: False)
        assert upload(client) == 507 and reserve.exists()
        assert act(client) == 200
        if act is delete_document:
            assert client.get("/v1/collections/one").json()["documents"] == 2
        if act is delete_collection:
            assert on_disk(client, gone) == 0
            assert not list((disk / "home" / "collections").glob(".deleted-*"))
        (disk / "ballast").unlink()
        reserve.unlink(missing_ok=True)
        stored(client, "two")
        assert client.delete("/v1/collections/two").status_code == 200
        assert reserve.exists()


def test_a_full_disk_without_kv_and_reserve_refuses_with_507_and_finishes_a_deletion_after_a_restart(
    reader: Engine, disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with client_of(app_on(reader, disk / "home", engine=CONFIG)) as client:
        keys = stored(client, "one")
        reserve = disk / "home" / "reserve"
        fill(disk)
        client.app.state.service.tenants.free_disk = lambda *_: False  # type: ignore[attr-defined]
        monkeypatch.setattr(StoreLimits, "free_disk", lambda _: False)
        reserve.unlink()
        fill(disk)
        refused = client.post(
            "/v1/collections/one/documents",
            json={"documents": [{"id": "new", "text": WORDS.format("new") * 200}]},
        )
        assert (refused.status_code, refused.json()["error"]["code"]) == (507, "disk_full")
        assert client.get("/v1/collections/one").json()["documents"] == 3
        assert delete_collection(client) == 200
        assert client.get("/v1/collections/one").status_code == 404
        assert on_disk(client, keys) > 0, "it could not be noted"
        (disk / "ballast").unlink()
        until(lambda: on_disk(client, keys) == 0, 20.0)
        again = stored(client, "one")
        reserve.unlink(missing_ok=True)
        fill(disk)
        assert delete_collection(client) == 200 and on_disk(client, again) > 0
    (disk / "ballast").unlink()
    with client_of(app_on(reader, disk / "home", engine=CONFIG)) as client:
        assert client.get("/v1/collections").json()["data"] == []
        assert on_disk(client, again) == 0
