"""Conversations on the page: follow-up questions; new, choose, fork, delete."""

from typing import Any

import pytest

from .helpers import ask

FIRST = "What does Verlab sell?"
SECOND = "What is the code name of Kiralus?"


@pytest.fixture
def talked(asked: Any) -> Any:
    """A tab in which one question was asked."""
    asked.first = ask(asked, FIRST)
    asked.wait_for_selector(".session.current")
    return asked


def current(page: Any) -> dict[str, Any]:
    """The API's entry of the page's conversation."""
    named = page.locator(".session.current").get_attribute("data-session")
    return page.request.get(f"/v1/sessions/{named}").json()


def more(page: Any, what: str) -> None:
    page.locator(".session.current .square").click()
    page.locator(".session.current").get_by_role("button", name=what).click()


def elsewhere(page: Any, than: str) -> None:
    page.wait_for_function(
        "id => document.querySelector('.session.current')?.dataset.session !== id", arg=than
    )


def test_a_follow_up_question_has_its_history_in_the_strip(talked: Any) -> None:
    said = ask(talked, SECOND)
    history = [span for span in said["prompt"] if span["kind"] == "history"]
    assert history and said["session_id"] == talked.first["session_id"]
    shown = talked.locator(".strip").last.locator(".span[data-kind=history]")
    assert shown.count() == len(history)
    assert shown.first.get_attribute("aria-label").startswith("Conversation: ")
    assert talked.locator(".turn").count() == 2
    opened = talked.locator("details.made").evaluate_all("nodes => nodes.map(node => node.open)")
    assert opened == [False, True]  # the last strip is checked
    talked.wait_for_function(
        "() => document.querySelector('.session.current').innerText.includes('2 turns')"
    )
    assert current(talked)["turns"] == 2


def test_a_title_is_kept_by_the_server_and_not_by_the_browser(
    talked: Any, browser: Any, server: str
) -> None:
    assert talked.evaluate("[sessionStorage.length, ...Object.keys(localStorage)]") == [
        0,
        f"ragkv.said.{current(talked)['id']}",
    ]
    title = talked.locator(".session.current .title").inner_text()
    ask(talked, SECOND)
    assert current(talked)["title"] == title == FIRST  # the first question's, also after the second
    context = browser.new_context(base_url=server)
    other = context.new_page()
    other.goto("/")
    row = other.locator(f".session[data-session='{current(talked)['id']}'] .title")
    row.wait_for()
    assert row.inner_text() == FIRST
    row.click()
    # its text is in the first browser
    assert other.locator(".welcome h1").inner_text() == "Continue this conversation"
    context.close()


def test_a_conversation_is_shown_and_continues_after_a_reload(talked: Any) -> None:
    answer = talked.evaluate("probes.answer()")
    talked.reload()
    talked.wait_for_selector(".turn.whole")
    assert (
        talked.locator(".turn h3").all_inner_texts() == [FIRST]
        and talked.evaluate("probes.answer()") == answer
    )
    said = ask(talked, SECOND)
    assert any(span["kind"] == "history" for span in said["prompt"])


def test_a_fork_has_the_same_history_and_continues_independently(talked: Any) -> None:
    before = current(talked)
    more(talked, "Fork")
    elsewhere(talked, before["id"])
    forked = current(talked)
    assert (forked["turns"], forked["tokens"]) == (1, before["tokens"])
    assert talked.locator(".session.current .title").inner_text() == f"{FIRST} (fork)"
    assert talked.locator(".turn h3").all_inner_texts() == [FIRST]
    ask(talked, SECOND)
    assert current(talked)["turns"] == 2
    assert talked.request.get(f"/v1/sessions/{before['id']}").json()["turns"] == 1
    talked.locator(f".session[data-session='{before['id']}'] .go").click()
    assert talked.locator(".turn").count() == 1


def test_a_conversation_is_deleted_after_a_confirmation(talked: Any) -> None:
    gone = current(talked)["id"]
    more(talked, "Delete…")
    talked.get_by_role("button", name="Cancel").click()
    assert talked.request.get(f"/v1/sessions/{gone}").ok
    talked.locator(".session.current").get_by_role("button", name="Delete…").click()
    talked.get_by_role("dialog").get_by_role("button", name="Delete").click()
    talked.wait_for_function("id => !document.querySelector(`[data-session='${id}']`)", arg=gone)
    assert talked.request.get(f"/v1/sessions/{gone}").status == 404
    assert talked.locator(".turn").count() == 0
