"""Logs: one line per event, without user text and without keys."""

import io
import json
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog
from starlette.testclient import TestClient

from ragkv.api.keys import KeyFile
from ragkv.api.logs import configure_logging, error_location, logger
from ragkv.api.settings import LogConfig


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> Iterator[io.StringIO]:
    root = logging.getLogger()
    names = ("", "ragkv", "uvicorn", "uvicorn.error", "uvicorn.access")
    before = {name: (logging.getLogger(name).handlers, logging.getLogger(name).level) for name in names}
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    configure_logging(LogConfig(format="json"))
    yield stream
    for name, (handlers, level) in before.items():
        known = root if not name else logging.getLogger(name)
        known.handlers, known.propagate = handlers, True
        known.setLevel(level)
    structlog.reset_defaults()


def _lines(stream: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_a_request_writes_one_access_line_with_key_route_tokens_and_duration(
    small: TestClient, tmp_path: Path, written: io.StringIO
) -> None:
    secret, key = KeyFile(tmp_path / "keys.json").add("alice")
    headers = {"authorization": f"Bearer {secret}", "x-request-id": "mine"}
    small.post("/v1/answers", json={"question": "a private question"}, headers=headers)
    (line,) = [line for line in _lines(written) if line["event"] == "request"]
    assert line.pop("duration_s") >= 0 and line.pop("timestamp")
    assert line == {
        "event": "request",
        "level": "info",
        "logger": "ragkv.api",
        "request_id": "mine",
        "key": key.id,
        "method": "POST",
        "route": "/v1/answers",
        "status": 200,
        "prompt_tokens": 42,
        "reused_tokens": 30,
        "answer_tokens": 5,
        "ttft_s": 0.1,
    }


def test_no_log_line_holds_user_text_or_a_key(small: TestClient, tmp_path: Path, written: io.StringIO) -> None:
    secret, _ = KeyFile(tmp_path / "keys.json").add("alice")
    headers = {"authorization": f"Bearer {secret}"}
    small.get("/v1/fails/sesame", headers=headers)
    small.get("/v1/stream?fail=true&q=sesame", headers=headers)
    small.post("/v1/echo?q=sesame", json={"question": "sesame"}, headers=headers)
    small.post("/v1/answers", content=b"sesame", headers={**headers, "content-type": "sesame"})
    small.get("/v1/sesame", headers={"authorization": f"Bearer {secret}x"})
    logging.getLogger("httpx").info("GET /?q=sesame")
    try:
        raise ValueError("sesame")
    except ValueError:
        logging.getLogger("uvicorn.error").exception("Exception in ASGI application")
        logging.getLogger("uvicorn.error").error("Traceback (most recent call last): sesame")
        logger().exception("failed")
    text = written.getvalue()
    assert text.count('"event": "request"') == 5
    assert "sesame" not in text and secret[16:] not in text and "private" not in text
    failed = [line for line in _lines(written) if "error" in line]
    assert len(failed) >= 3 and all("ValueError at " in line["error"] for line in failed)


def test_an_unexpected_error_is_logged_with_its_request_id(small: TestClient, written: io.StringIO) -> None:
    small.get("/v1/fails/x", headers={"x-request-id": "mine"})
    error = next(line for line in _lines(written) if line["level"] == "error")
    assert error["request_id"] == "mine"
    assert "small_app.py" in error["error"] and " fails" in error["error"]


def test_probes_write_no_access_line(small: TestClient, written: io.StringIO) -> None:
    for path in ("/livez", "/readyz", "/metrics"):
        assert small.get(path).status_code == 200
    assert _lines(written) == []


def test_an_error_location_names_causes_without_messages() -> None:
    try:
        try:
            raise KeyError("inner secret")
        except KeyError as inner:
            raise ValueError("outer secret") from inner
    except ValueError as error:
        told = error_location(error)
    assert "ValueError at" in told and "caused by builtins.KeyError at" in told and "secret" not in told


def test_log_level_and_format_follow_the_settings(monkeypatch: pytest.MonkeyPatch, written: io.StringIO) -> None:
    monkeypatch.setattr(sys, "stderr", written)  # pytest replaces stderr between the fixture and the test
    configure_logging(LogConfig(level="error", format="console"))
    logging.getLogger("ragkv.store").warning("quiet")
    logging.getLogger("ragkv.store").error("loud %d", 5)
    text = written.getvalue()
    assert "loud 5" in text and "quiet" not in text and "{" not in text
