"""/v1/models and /v1/stats: the served models, and the caller's store."""

from fastapi.testclient import TestClient

from ragkv.api import ServeConfig
from ragkv.api.service import Service

from .helpers import filled


def test_models_lists_the_language_model_and_the_embedding_model(client: TestClient) -> None:
    listed = client.get("/v1/models").json()
    assert listed["object"] == "list" and [one["id"] for one in listed["data"]] == ["reader", "hash"]
    assert client.get("/v1/models/reader").json() == listed["data"][0]
    missing = client.get("/v1/models/gpt/4")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "model_not_found")


def test_a_model_id_is_its_folder_name_or_hub_id() -> None:
    assert Service(ServeConfig(model="/some/where/model-7b")).model_id == "model-7b"
    assert Service(ServeConfig(model="org/model-7b")).model_id == "org/model-7b"


def test_stats_describe_the_model_and_the_callers_store(client: TestClient) -> None:
    empty = client.get("/v1/stats").json()
    filled(client)
    client.post("/v1/ask", json={"question": "mill", "collection": "facts"})
    got = client.get("/v1/stats").json()
    assert [tier["tier"] for tier in got["tiers"]] == ["memory", "disk"]
    assert [tier["entries"] for tier in empty["tiers"]] == [0, 0] and got["tiers"][1]["entries"] == 2
    assert (empty["collections_open"], got["collections_open"]) == (0, 1)
    assert got["tiers"][0]["hits"] == 2 and got["queue"]["served"] == 1
    value_bytes = {"bfloat16": 2, "float32": 4}[got["dtype"]]  # whichever this processor computes faster
    assert (got["model"], got["context_tokens"], got["kv_bytes_per_token"]) == ("reader", 2048, 2048 * value_bytes)
