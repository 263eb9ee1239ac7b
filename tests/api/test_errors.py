"""Errors have one shape and the right status; the message of an unexpected error is not shown."""

from typing import Any

import pytest
from fastapi.testclient import TestClient

from ragkv import errors
from ragkv.api.failures import as_api_error, response_to
from tests.faults import raising

from .helpers import engine_of, filled

TREE = [
    (errors.PromptTooLongError("x"), 400, "invalid_request_error", "context_length_exceeded"),
    (errors.InputError("x"), 400, "invalid_request_error", None),
    (errors.QueueFullError("x"), 503, "overloaded_error", "queue_full"),
    (errors.DeadlineError("x"), 504, "timeout_error", "deadline_exceeded"),
    (errors.CancelledError("x"), 499, "client_gone", None),
    (errors.StoreLockedError("x"), 503, "overloaded_error", "store_locked"),
    (errors.StoreError("secret"), 500, "server_error", None),
    (RuntimeError("secret"), 500, "server_error", None),
]


@pytest.mark.parametrize(
    ("error", "status", "kind", "code"), TREE, ids=lambda one: type(one).__name__
)
def test_every_ragkv_error_has_its_status_and_code(
    error: Exception, status: int, kind: str, code: str | None
) -> None:
    found = as_api_error(error)
    assert (found.status, found.type, found.code) == (status, kind, code)
    assert (status == 500) != (found.message == str(error))
    assert ("retry-after" in response_to(error, "/").headers) == (status == 503)


@pytest.mark.parametrize(
    ("method", "path", "content", "status"),
    [
        ("GET", "/v1/nothing", None, 404),
        ("GET", "/v1/ask", None, 405),
        ("POST", "/v1/ask", b"{", 400),
        ("POST", "/v1/ask", b"", 400),
        ("POST", "/v1/ask", b"[]", 400),
        ("POST", "/v1/ask", b'{"question": NaN}', 400),
        ("POST", "/v1/ask", b'{"question": "\\ud800"}', 400),
        ("POST", "/v1/ask", b'{"question":' + b"[" * 20_000, 400),
        ("POST", "/v1/ask", b"\xff\xfe", 400),
        ("POST", "/v1/ask", b"null", 400),
        ("POST", "/v1/ask", b'{"question": "x", "question": 5}', 400),
        ("POST", "/v1/collections/facts/documents", b'{"documents": [{"text": "\\udfff"}]}', 400),
        ("GET", "/v1/collections/facts/documents?limit=0", None, 400),
    ],
)
def test_every_bad_request_gets_the_error_shape(
    client: TestClient, method: str, path: str, content: bytes | None, status: int
) -> None:
    headers = {} if content is None else {"content-type": "application/json"}
    response = client.request(method, path, content=content, headers=headers)
    assert response.status_code == status, response.text
    assert set(response.json()["error"]) == {"message", "type", "param", "code"}
    assert response.headers["x-request-id"]
    assert "Value error" not in response.text
    assert status != 405 or response.headers["allow"] == "POST"


def test_a_refused_method_is_told_all_that_its_path_has(
    client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    # it would hold the event loop for half a second
    monkeypatch.setattr(client.app, "openapi", None)
    for path in ("/v1/sessions/s", "/v1/collections/facts/documents/x"):
        assert client.options(path).headers["allow"] == "DELETE, GET"
    assert client.post("/static/x").headers["allow"] == "GET, HEAD"  # of what is not described


def test_the_openapi_document_is_made_once(client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made = list[int]()
    monkeypatch.setattr(client.app, "openapi", lambda: made.append(1) or {})
    assert [client.get("/openapi.json").json() for _ in range(2)] == [{}, {}] and made == [1]


def test_an_unexpected_error_becomes_a_bare_500(
    client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled(client)
    monkeypatch.setattr(engine_of(client.app), "events", raising(RuntimeError("the secret")))
    whole = client.post("/v1/ask", json={"question": "x", "collection": "facts"})
    assert whole.status_code == 500 and "secret" not in whole.text
    told = client.post("/v1/ask", json={"question": "x", "collection": "facts", "stream": True})
    assert told.status_code == 200 and "event: error" in told.text and "secret" not in told.text
    body = {"model": "reader", "messages": [{"role": "user", "content": "x"}], "stream": True}
    # before the first token
    assert client.post("/v1/chat/completions", json=body).status_code == 500
