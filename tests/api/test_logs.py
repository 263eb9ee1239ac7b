"""Logs: one line per event, without user text and without keys."""

import io
import json
import logging
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog
from starlette.testclient import TestClient

from ragkv.api.keys import KeyFile
from ragkv.api.logs import configure_logging, log
from ragkv.api.settings import LogConfig


@pytest.fixture
def written(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[io.StringIO]:
    """What is logged, as JSON or in the format that a test names."""
    root = logging.getLogger()
    names = ("", "ragkv", "uvicorn", "uvicorn.error", "uvicorn.access")
    before = {
        name: (logging.getLogger(name).handlers, logging.getLogger(name).level) for name in names
    }
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    configure_logging(LogConfig(format=getattr(request, "param", "json")))
    yield stream
    for name, (handlers, level) in before.items():
        known = root if not name else logging.getLogger(name)
        known.handlers = handlers
        known.propagate = True
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
    where = {
        "event": "request",
        "level": "info",
        "logger": "ragkv.api",
        "request_id": "mine",
        "key": key.id,
    }
    what = {"method": "POST", "route": "/v1/answers", "status": 200}
    assert line == where | what | {
        "prompt_tokens": 42,
        "reused_tokens": 30,
        "answer_tokens": 5,
        "ttft_s": 0.1,
    }


def test_no_log_line_holds_user_text_or_a_key(
    small: TestClient, tmp_path: Path, written: io.StringIO
) -> None:
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
        log.exception("failed")
    text = written.getvalue()
    assert text.count('"event": "request"') == 5
    assert "sesame" not in text and secret[16:] not in text and "private" not in text
    failed = [line for line in _lines(written) if "error" in line]
    assert len(failed) >= 3 and all("ValueError at " in line["error"] for line in failed)


def test_probes_write_no_access_line(small: TestClient, written: io.StringIO) -> None:
    for path in ("/livez", "/readyz", "/metrics"):
        assert small.get(path).status_code == 200
    assert _lines(written) == []


@pytest.mark.parametrize("written", ["json", "console"], indirect=True)
def test_no_client_writes_lines_or_escape_codes_into_the_log(written: io.StringIO) -> None:
    text = "a\nINFO forged\r\x1b[2Jb\x9b31m\u2028c\u202ed"
    log.info("request", name=text, names=[text])
    logging.getLogger("ragkv.other").warning("it says %s", text)
    assert len(written.getvalue().splitlines()) == 2, written.getvalue()
    assert not re.search("[\x00-\x08\x0b-\x1a\x1c-\x1f\x7f-\x9f\u2028\u202e]", written.getvalue())
    assert "\x1b[2J" not in written.getvalue()
