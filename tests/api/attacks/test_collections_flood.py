"""Floods of collections and sessions: few are open, quotas hold, listings stay cheap, races end
well.
"""

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from ragkv import Engine
from ragkv.api.documents.collection_folders import CollectionFolders
from ragkv.api.documents.collections import CollectionPool
from ragkv.api.documents.upload_parsing import Parsed
from ragkv.api.errors import ApiError
from ragkv.api.keys import ANONYMOUS, KeyFile
from ragkv.retrieval import Document
from tests.api.helpers import FACTS, app_on, client_of, filled, service_of
from tests.scheduling.helpers import begin, until


def pool_of(client: TestClient) -> CollectionPool:
    return service_of(client.app).tenants._collections  # type: ignore[arg-type]


def search(client: Any, name: str, query: str = "mill") -> Any:
    return client.post(f"/v1/collections/{name}/search", json={"query": query, "k": 1})


# Few open collections


def test_more_collections_than_may_be_open_are_all_usable(reader: Engine, tmp_path: Path) -> None:
    with client_of(app_on(reader, tmp_path, open_collections=2)) as client:
        names = [
            filled(client, f"c{number}", [f"The mill number {number} was built."])
            for number in range(6)
        ]
        for name in names + names:
            hits = search(client, name).json()["hits"]
            assert [hit["text"] for hit in hits] == [f"The mill number {name[1:]} was built."]
            assert (
                client.post("/v1/ask", json={"question": "mill", "collection": name}).status_code
                == 200
            )
            assert len(pool_of(client).opened()) <= 2
        assert [client.delete(f"/v1/collections/{name}").status_code for name in names] == [200] * 6
        assert pool_of(client).opened() == {}


def test_a_tenant_with_many_collections_does_not_close_another_tenants(
    reader: Engine, tmp_path: Path
) -> None:
    file = KeyFile(tmp_path / "keys.json")
    keys = [file.add(name, name)[0] for name in ("attacker", "bystander")]
    app = app_on(reader, tmp_path, open_collections=3)
    with client_of(app, keys[0]) as attacker:
        bystander = client_of(app, keys[1])
        filled(bystander)
        search(bystander, "facts")
        before = [
            one for key, one in pool_of(attacker).opened().items() if "bystander" in key.path.parts
        ]
        for number in range(8):
            filled(attacker, f"c{number}", FACTS[:1])
        after = [
            one for key, one in pool_of(attacker).opened().items() if "bystander" in key.path.parts
        ]
        assert len(before) == 1 and after == before


def test_creating_showing_and_listing_opens_no_collection(reader: Engine, tmp_path: Path) -> None:
    with client_of(app_on(reader, tmp_path)) as client:
        filled(client, "a")
    with client_of(app_on(reader, tmp_path)) as client:
        client.post("/v1/collections", json={"name": "b"})
        listed = client.get("/v1/collections").json()["data"]
        assert [(one["name"], one["documents"], one["chunks"]) for one in listed] == [
            ("a", 2, 2),
            ("b", 0, 0),
        ]
        assert client.get("/v1/collections/a").json() == listed[0]
        assert pool_of(client).opened() == {}
        client.delete("/v1/collections/a/documents/0")
        # read again after the change
        assert client.get("/v1/collections/a").json()["documents"] == 1


# Races


def test_a_deletion_hides_the_collection_and_waits_for_requests_that_use_it(
    client: TestClient,
) -> None:
    filled(client)
    with service_of(client.app).tenants.use(ANONYMOUS) as tenant:  # type: ignore[arg-type]
        with tenant.collections.use("facts") as collection:
            deletion = begin(tenant.collections.delete, "facts")
            until(lambda: client.get("/v1/collections/facts").status_code == 404)
            assert (
                search(client, "facts").status_code
                == client.delete("/v1/collections/facts").status_code
                == 404
            )
            assert client.get("/v1/collections").json()["data"] == []
            assert client.post("/v1/collections", json={"name": "facts"}).status_code == 409
            tenant.collections.ingest(collection, Parsed([Document("late", "The new harbour.")]))
            assert deletion.is_alive() and len(collection.retrieve("harbour", 1)) == 1
        deletion.join(30)
        assert not deletion.is_alive()
    filled(client, "facts", ["The mill is new."])
    assert [hit["text"] for hit in search(client, "facts").json()["hits"]] == ["The mill is new."]


def test_documents_for_a_collection_that_another_process_deletes_get_404(
    client: TestClient, tmp_path: Path
) -> None:
    filled(client)
    with (
        service_of(client.app).tenants.use(ANONYMOUS) as tenant,  # type: ignore[arg-type]
        pytest.raises(ApiError, match="There is no collection 'facts'"),
        tenant.collections.use("facts") as collection,
    ):
        delete_in_another_process(tmp_path, "facts").create("facts", print)
        tenant.collections.ingest(collection, Parsed([Document("late", "The new harbour.")]))
    assert client.get("/v1/collections/facts").json()["documents"] == 0


def delete_in_another_process(home: Path, *names: str) -> CollectionFolders:
    """Delete collections as another process does it; returns its folders."""
    folders = CollectionFolders(home)
    for name in names:
        key = folders.hide(name)
        assert key is not None
        shutil.rmtree(folders.rename(name, key))
    return folders


def test_what_another_process_deletes_is_closed_without_a_request(
    client: TestClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ragkv.api.documents.deletions.POLL_S", 0.05)
    names = [filled(client, f"c{number}", FACTS[:1]) for number in range(20)]
    assert (
        len(client.get("/v1/collections").json()["data"])
        == len(pool_of(client).opened())
        == len(names)
    )
    others = delete_in_another_process(tmp_path, *names[1:])
    until(lambda: [key.path.name for key in pool_of(client).opened()] == names[:1])
    descriptors = Path("/proc/self/fd")
    until(
        lambda: (
            not any("sqlite (deleted)" in os.path.realpath(one) for one in descriptors.iterdir())
        )
    )
    assert len(client.get("/v1/collections").json()["data"]) == 1
    folders = service_of(client.app).tenants.opened()[""].collections.folders  # type: ignore[arg-type]
    assert [path.name for path in folders._sizes] == names[:1]
    others.create(names[1], print)
    assert search(client, names[1]).json()["hits"] == []
