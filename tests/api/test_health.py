"""/livez and /readyz before and while requests are accepted."""

from pathlib import Path

from starlette.testclient import TestClient

from ragkv.api.keys import KeyFile
from ragkv.api.settings import ServeConfig

from .small_app import small_client, state_of


def test_requests_get_503_until_the_model_is_loaded(tmp_path: Path) -> None:
    with small_client(ServeConfig(home=str(tmp_path)), ready=False) as it:
        assert it.get("/livez").json()["status"] == "ok"
        ready = it.get("/readyz")
        assert (ready.status_code, ready.json()["reason"]) == (503, "The model is being loaded.")
        refused = it.post("/v1/echo", json={})
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "2")
        assert refused.json()["error"]["code"] == "not_ready"
        assert it.get("/v1/unknown").status_code == 404
        state_of(it).unavailable_reason = "The model could not be loaded: no such folder."
        assert "no such folder" in it.get("/readyz").json()["reason"]
        state_of(it).unavailable_reason = None
        assert it.get("/readyz").status_code == 200
        assert it.post("/v1/echo", json={}).status_code == 200


def test_health_routes_need_no_key(small: TestClient, tmp_path: Path) -> None:
    KeyFile(tmp_path / "keys.json").add("alice")
    assert [small.get(path).status_code for path in ("/livez", "/readyz")] == [200, 200]
