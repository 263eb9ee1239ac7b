"""Shared by the page's tests: asking on the page, reading the API's events, and making
responses.
"""

import json
from typing import Any

from tests.api.helpers import events
from tests.api.page.conftest import QUESTION


def put(page: Any, question: str = QUESTION) -> None:
    """Send a question on the page."""
    page.fill("#question", question)
    page.press("#question", "Enter")


def ask(page: Any, question: str = QUESTION) -> dict[str, Any]:
    """Ask on the page and wait for the end; returns the `answer` event of the stream that the page
    read.
    """
    turns = page.locator(".turn").count()
    streams = page.evaluate("streams.length")
    put(page, question)
    page.wait_for_function("n => document.querySelectorAll('.turn').length === n", arg=turns + 1)
    page.wait_for_selector(".turn:last-child.whole:not(.working)")
    # Wait for the stream of this question, not of an earlier one.
    page.wait_for_function("n => streams.length > n && streams.at(-1)", arg=streams)
    name, said = events(page.evaluate("streams.at(-1)"))[-1]
    assert name == "answer"
    return said


def stream(*said: tuple[str, dict[str, Any]]) -> str:
    """Server-sent events as text."""
    return "".join(f"event: {name}\ndata: {json.dumps(data)}\n\n" for name, data in said)


def streaming(page: Any, body: str, times: int | None = None) -> None:
    """Answer questions of the page with `body` from now on; then the connection ends."""
    page.route(
        "**/v1/ask",
        lambda route: route.fulfill(content_type="text/event-stream", body=body),
        times=times,
    )


def refusal(
    status: int, message: str, headers: dict[str, str] | None = None, code: str | None = None
) -> dict[str, Any]:
    """An error response of the API, for `route.fulfill`."""
    error = {"message": message, "type": "x", "param": None, "code": code}
    return {"status": status, "json": {"error": error}, "headers": headers or {}}


REUSE = {
    "exact": 2, "fused": 0, "recomputed": 0, "computed": 3, "tokens": 5, "bytes_by_tier": {}, "missed_chunks": 0,
    "missed_tokens": 0, "ratio": 0.15, "selector": "hkvd", "compute": 1.0, "notes": [], "decision": [],
}  # fmt: skip
TIMING = dict.fromkeys(
    ("queue_s", "lookup_s", "load_s", "fuse_s", "prefill_s", "first_token_s", "decode_s"), 0.01
)
SPAN = {"recomputed": 0, "recomputed_at": [], "number": None}
PROMPT = [
    {"kind": "prefix", "start": 0, "tokens": 2, "state": "exact", **SPAN},
    {"kind": "question", "start": 2, "tokens": 3, "state": "computed", **SPAN},
]


def source(number: int = 1, text: str = "Ostmax sells ovens.") -> dict[str, Any]:
    """A source of the API."""
    return {
        "number": number, "document_id": f"d{number}", "source": f"d{number}.md", "title": None, "text": text,
        "start": 0, "end": len(text), "score": 1.0,
    }  # fmt: skip


def answer(
    text: str, sources: list[dict[str, Any]], citations: list[dict[str, Any]]
) -> dict[str, Any]:
    """An `answer` event of the API, with a text that the small reader would not give."""
    return {
        "id": "ask-1", "answer": text, "finish_reason": "stop", "citations": citations, "sources": sources,
        "reuse": REUSE, "timing": TIMING, "prompt": PROMPT, "session_id": "s",
    }  # fmt: skip
