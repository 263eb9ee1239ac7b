"""The middleware: request ids, keys, hosts and origins, content types and sizes; errors of one
shape.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from ragkv.api.keys import KeyFile
from ragkv.api.settings import AuthConfig, LimitsConfig, ServeConfig

from .small_app import small_client

JSON = {"content-type": "application/json"}


def _config(home: Path, **more: Any) -> ServeConfig:
    return ServeConfig(home=str(home), limits=LimitsConfig(body_bytes=1000), **more)


def _refused(response: Any, status: int, code: str | None = None) -> str:
    """Check status, code and shape of an error; returns its message."""
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == code
    assert response.headers["x-request-id"]
    return str(error["message"])


@pytest.fixture
def small(tmp_path: Path) -> Iterator[TestClient]:
    """A client of the small app with the limits of `_config`."""
    with small_client(_config(tmp_path)) as client:
        yield client


# Request ids


def test_a_response_has_the_requests_id_or_a_new_one(small: TestClient) -> None:
    assert (
        small.get("/livez", headers={"x-request-id": "mine-1.2_3"}).headers["x-request-id"]
        == "mine-1.2_3"
    )
    made = {small.get("/livez").headers["x-request-id"] for _ in range(3)}
    assert len(made) == 3 and all(re.fullmatch(r"req-[0-9a-f]{32}", name) for name in made)


def test_every_response_has_the_security_headers(small: TestClient) -> None:
    for path in ("/livez", "/v1/nowhere", "/v1/fails/x"):
        headers = small.get(path).headers
        policy = headers["content-security-policy"]
        assert "default-src 'self'" in policy and "frame-ancestors 'none'" in policy
        assert "unsafe" not in policy and "http" not in policy
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["referrer-policy"] == "no-referrer"


# Keys


def test_a_request_needs_a_valid_key_once_there_is_one(small: TestClient, tmp_path: Path) -> None:
    assert small.post("/v1/echo", json={}).status_code == 200
    secret, key = KeyFile(tmp_path / "keys.json").add("alice")
    for headers in (
        {},
        {"authorization": "Bearer "},
        {"authorization": f"Basic {secret}"},
        {"authorization": secret},
        {"authorization": f"Bearer {secret}x"},
        {"x-api-key": secret},
    ):
        response = small.post("/v1/echo", json={}, headers=headers)
        _refused(response, 401, "invalid_api_key")
        assert response.headers["www-authenticate"] == "Bearer"
    assert (
        small.post("/v1/echo", json={}, headers={"authorization": f"bearer  {secret}"}).json()[
            "tenant"
        ]
        == key.id
    )
    KeyFile(tmp_path / "keys.json").revoke(key.id)
    _refused(
        small.post("/v1/echo", json={}, headers={"authorization": f"Bearer {secret}"}),
        401,
        "invalid_api_key",
    )


def test_without_a_key_unknown_and_known_paths_both_get_401(
    small: TestClient, tmp_path: Path
) -> None:
    KeyFile(tmp_path / "keys.json").add("alice")
    assert {
        small.get(path).status_code for path in ("/v1/echo", "/v1/nowhere", "/nowhere", "/v1")
    } == {401}
    assert small.get("/livez").status_code == 200
    assert small.get("/static/../v1/stream").status_code == 401
    assert small.get("/static/%2e%2e/v1/stream").status_code in (401, 404)


def test_a_server_reachable_by_others_refuses_requests_without_keys(tmp_path: Path) -> None:
    with small_client(_config(tmp_path, host="0.0.0.0")) as it:
        _refused(it.post("/v1/echo", json={}), 401, "invalid_api_key")
    with small_client(_config(tmp_path, host="0.0.0.0", auth=AuthConfig(required=False))) as it:
        assert it.post("/v1/echo", json={}).json()["tenant"] == ""


# Host and origin


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 200),
        ("127.0.0.1:8000", 200),
        ("[::1]:8000", 200),
        ("rebound.example:8000", 403),
        ("localhost.rebound.example", 403),
        ("user@rebound.example", 403),
        ("[", 403),
    ],
)
def test_without_keys_only_loopback_host_names_are_accepted(
    small: TestClient, host: str, status: int
) -> None:
    assert small.get("/v1/stream", headers={"host": host}).status_code == status
    assert small.get("/livez", headers={"host": host}).status_code == status


def test_configured_hosts_are_accepted_and_with_keys_any_host_is(tmp_path: Path) -> None:
    with small_client(_config(tmp_path, hosts=("RAG.example",))) as it:
        assert it.get("/v1/stream", headers={"host": "rag.example:8000"}).status_code == 200
        _refused(it.get("/v1/stream", headers={"host": "other.example"}), 403, "host_not_allowed")
    secret, _ = KeyFile(tmp_path / "keys.json").add("alice")
    headers = {"host": "any.example", "authorization": f"Bearer {secret}"}
    with small_client(_config(tmp_path)) as it:
        assert it.get("/v1/stream", headers=headers).status_code == 200
    with small_client(_config(tmp_path, hosts=("rag.example",))) as it:
        _refused(it.get("/v1/stream", headers=headers), 403, "host_not_allowed")


@pytest.mark.parametrize(
    ("origin", "status"),
    [
        ("http://127.0.0.1:8000", 200),
        ("https://127.0.0.1:8000", 200),  # a proxy ended the TLS connection
        ("http://localhost:8000", 403),
        ("http://127.0.0.1:8000.evil.example", 403),
        ("null", 403),
        ("", 403),
        ("http://[", 403),
    ],
)
def test_a_foreign_page_cannot_change_anything(small: TestClient, origin: str, status: int) -> None:
    response = small.post("/v1/echo", json={}, headers={"origin": origin})
    assert response.status_code == status
    assert not any(name.startswith("access-control") for name in response.headers)


def test_a_configured_origin_may_call_and_read(tmp_path: Path) -> None:
    origin = "https://docs.example"
    with small_client(_config(tmp_path, cors_origins=(origin,))) as it:
        asked = {"origin": origin, "access-control-request-method": "POST"}
        allowed = it.options(
            "/v1/echo", headers={**asked, "access-control-request-headers": "authorization"}
        )
        assert (
            allowed.status_code == 200 and allowed.headers["access-control-allow-origin"] == origin
        )
        response = it.post("/v1/echo", json={}, headers={"origin": origin})
        assert response.headers["access-control-allow-origin"] == origin
        assert "access-control-allow-credentials" not in response.headers
        _refused(
            it.post("/v1/echo", json={}, headers={"origin": "https://other.example"}),
            403,
            "cross_origin",
        )


# Content types, bodies and paths


def test_forms_are_accepted_where_documents_are_uploaded(small: TestClient) -> None:
    path = "/v1/collections/c/documents"
    assert small.post(path, files={"file": ("a.txt", b"abc")}).json() == {"bytes": 3, "name": "c"}
    _refused(small.post(path, files={"file": ("a.txt", b"a" * 1001)}), 413, "body_too_large")
    _refused(small.post(path, content=b"x", headers={"content-type": "text/plain"}), 415)


def test_body_bytes_are_counted_whatever_length_was_announced(small: TestClient) -> None:
    assert small.post("/v1/echo", content=b"x" * 1000, headers=JSON).json()["bytes"] == 1000
    _refused(small.post("/v1/echo", content=b"x" * 1001, headers=JSON), 413, "body_too_large")
    chunked = (b"x" * 100 for _ in range(11))
    _refused(small.post("/v1/echo", content=chunked, headers=JSON), 413, "body_too_large")
    lying = {**JSON, "content-length": "5"}
    _refused(small.post("/v1/echo", content=b"x" * 1001, headers=lying), 413, "body_too_large")
    absurd = {**JSON, "content-length": "9" * 5000}
    _refused(small.post("/v1/echo", content=b"x", headers=absurd), 413, "body_too_large")
