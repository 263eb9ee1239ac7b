"""/livez and /readyz before, while and after requests are accepted; the write probe of /readyz."""

import threading
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from ragkv.api import health
from ragkv.api.health import WriteProbe
from ragkv.api.keys import KeyFile
from ragkv.api.settings import ServeConfig

from .small_app import small_client, state_of


def test_requests_get_503_until_the_model_is_loaded(tmp_path: Path) -> None:
    with small_client(ServeConfig(home=str(tmp_path)), ready=False) as it:
        assert it.get("/livez").json() == {"status": "ok", "reason": None}
        ready = it.get("/readyz")
        assert (ready.status_code, ready.json()["reason"]) == (503, "The model is being loaded.")
        refused = it.post("/v1/echo", json={})
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "2")
        assert refused.json()["error"]["code"] == "not_ready"
        state_of(it).readiness.set_failed("The model could not be loaded: no such folder.")
        assert "no such folder" in it.get("/readyz").json()["reason"]
        state_of(it).readiness.set_ready()
        assert it.get("/readyz").status_code == 200
        assert it.post("/v1/echo", json={}).status_code == 200


def test_health_routes_need_no_key(small: TestClient, tmp_path: Path) -> None:
    KeyFile(tmp_path / "keys.json").add("alice")
    assert [small.get(path).status_code for path in ("/livez", "/readyz")] == [200, 200]


def test_a_store_that_cannot_be_written_to_is_not_ready(tmp_path: Path) -> None:
    good, gone = tmp_path / "good", tmp_path / "gone"
    good.mkdir()
    (good / "tmp").mkdir()
    with small_client(ServeConfig(home=str(tmp_path)), directories=[good]) as it:
        assert it.get("/readyz").status_code == 200
        assert list((good / "tmp").iterdir()) == []
    with small_client(ServeConfig(home=str(tmp_path)), directories=[good, gone]) as it:
        ready = it.get("/readyz")
        assert ready.status_code == 503
        assert ready.json()["reason"] == "A store cannot be written to: No such file or directory."


async def test_a_probe_of_a_hanging_disk_fails_after_a_timeout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    let_go = threading.Event()
    monkeypatch.setattr(health, "PROBE_WAIT_S", 0.05)
    monkeypatch.setattr(health, "_write", lambda _: let_go.wait(10))
    probe = WriteProbe(lambda: [tmp_path], interval_s=0.0)
    assert [await probe.failure() for _ in range(3)] == ["A store's disk does not answer."] * 3
    let_go.set()
    monkeypatch.setattr(health, "PROBE_WAIT_S", 5.0)
    assert await probe.failure() is None
