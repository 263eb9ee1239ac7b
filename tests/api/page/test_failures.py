"""Failures are explained in words, retried where that helps, and keep the text that has arrived."""

from typing import Any

import pytest

from .conftest import QUESTION
from .helpers import ask, put, refusal, source, stream, streaming

PARTLY = stream(
    ("sources", {"sources": [source()]}),
    ("token", {"text": "Ovens and "}),
    ("token", {"text": "sto"}),
)


@pytest.fixture
def failing(asked: Any) -> Any:
    """A tab whose browser may log failed requests."""
    asked.watch.allowed.append(r"Failed to load resource")
    return asked


def test_an_unreachable_server_is_reported(failing: Any) -> None:
    failing.route("**/v1/ask", lambda route: route.abort())
    put(failing)
    notice = failing.locator(".notice.bad")
    notice.wait_for()
    assert "cannot be reached" in notice.inner_text()
    failing.unroute("**/v1/ask")
    notice.get_by_role("button", name="Ask again").click()
    failing.wait_for_selector(".turn.whole")


@pytest.mark.usefixtures("library")
def test_the_page_waits_for_a_server_that_is_loading(page: Any) -> None:
    page.watch.allowed.append("Failed to load resource")
    told = refusal(503, "The model is being loaded. Ask again.", {"Retry-After": "2"})
    page.route("**/v1/collections", lambda route: route.fulfill(**told), times=2)
    page.goto("/")
    page.locator("#banner").wait_for()
    assert (
        page.locator("#banner")
        .inner_text()
        .startswith("The model is being loaded. Trying again in ")
    )
    page.wait_for_selector(".welcome h1")
    assert page.locator("#banner").is_hidden()


@pytest.mark.parametrize(
    ("status", "words"), [(503, "requests are running"), (429, "Too many requests")]
)
def test_a_busy_server_is_asked_again_after_retry_after(
    failing: Any, status: int, words: str
) -> None:
    told = refusal(status, "64 requests are running already; ask again.", {"Retry-After": "3"})
    failing.route("**/v1/ask", lambda route: route.fulfill(**told), times=1)
    failing.clock.install()
    put(failing)
    notice = failing.locator(".notice.waiting")
    notice.wait_for()
    assert words in notice.inner_text() and "in 3 seconds" in notice.inner_text()
    failing.clock.run_for(1000)
    assert "in 2 seconds" in notice.inner_text()
    assert len(failing.watch.paths("/v1/ask")) == 1
    failing.clock.run_for(2000)
    failing.wait_for_selector(".turn.whole")
    assert notice.count() == 0
    assert len(failing.watch.paths("/v1/ask")) == 2


@pytest.mark.usefixtures("server")
def test_a_question_without_any_collection_is_not_sent(page: Any) -> None:
    page.route("**/v1/collections", lambda route: route.fulfill(json={"data": []}))
    page.goto("/")
    page.wait_for_selector(".welcome .drop")
    put(page)
    assert "add a document first" in page.locator("#ask-hint").inner_text()
    assert page.input_value("#question") == QUESTION
    assert page.watch.paths("/v1/ask") == []


@pytest.mark.parametrize(
    ("response", "words"),
    [
        (
            refusal(400, "The prompt has 9000 tokens; the model's context is 1024."),
            "The prompt has 9000 tokens",
        ),
        (refusal(500, "", {"x-request-id": "req-77"}), "req-77"),
    ],
)
def test_the_servers_words_for_a_refusal_are_shown(
    failing: Any, response: dict[str, Any], words: str
) -> None:
    failing.route("**/v1/ask", lambda route: route.fulfill(**response))
    put(failing)
    failing.locator(".notice.bad").wait_for()
    assert words in failing.locator(".notice.bad").inner_text()


def test_a_broken_stream_keeps_the_received_text_and_says_so(failing: Any) -> None:
    streaming(failing, PARTLY, times=1)
    put(failing)
    notice = failing.locator(".notice.bad")
    notice.wait_for()
    assert (
        "The connection broke before the answer was complete. What had arrived stays"
        in notice.inner_text()
    )
    assert failing.locator(".answer").inner_text() == "Ovens and sto"
    assert failing.locator(".chip").count() == 1
    notice.get_by_role("button", name="Ask again").click()
    failing.wait_for_selector(".turn.whole")


@pytest.mark.parametrize("by", ["button", "Escape"])
def test_the_user_can_stop_an_answer(asked: Any, by: str) -> None:
    """The events are also reassembled when they are cut anywhere, even inside a character."""
    asked.evaluate("probes.slow = true")
    put(asked)
    asked.wait_for_function(
        "() => document.querySelector('.answer').textContent === 'Ovens 🧁 here'"
    )
    if by == "button":
        asked.click("#stop")
    else:
        asked.keyboard.press("Escape")
    notice = asked.locator(".notice")
    notice.wait_for()
    assert "Stopped. What had arrived stays" in notice.inner_text()
    assert asked.locator(".answer").inner_text() == "Ovens 🧁 here"
    assert asked.locator("#send").is_visible() and asked.locator("#stop").is_hidden()


@pytest.mark.usefixtures("library")
def test_an_api_key_is_stored_in_the_tab_only(page: Any) -> None:
    def guard(route: Any) -> None:
        given = route.request.headers.get("authorization")
        route.continue_() if given == "Bearer rk-good" else route.fulfill(
            **refusal(401, "no", code="invalid_api_key")
        )

    page.watch.allowed.append("Failed to load resource")
    page.route("**/v1/**", guard)
    page.goto("/")
    dialog = page.get_by_role("dialog")
    dialog.wait_for()
    assert "asks for an API key" in dialog.inner_text()
    page.get_by_label("Key", exact=True).fill("rk-wrong")
    page.keyboard.press("Enter")
    page.get_by_text("did not accept that key").wait_for()
    page.get_by_label("Key", exact=True).fill("rk-good")
    page.get_by_role("button", name="Use this key").click()
    page.wait_for_selector("#sessions li")
    assert page.evaluate("sessionStorage.getItem('ragkv.key')") == "rk-good"
    assert page.evaluate("[JSON.stringify(localStorage).includes('rk-'), document.cookie]") == [
        False,
        "",
    ]
    assert "rk-good" not in page.url
    ask(page)
    page.click("#key")
    page.get_by_role("button", name="Forget it").click()
    page.get_by_role("dialog").get_by_text("asks for an API key").wait_for()
    assert page.evaluate("sessionStorage.getItem('ragkv.key')") is None
