"""Accessibility and layout: keyboard only, small screens, dark and light, reduced motion, readable
text.
"""

from typing import Any

import pytest

from .conftest import QUESTION
from .helpers import ask, put


def test_asking_a_question_needs_no_mouse(page: Any, library: str) -> None:
    page.goto(f"/#collection={library}")
    page.wait_for_selector("#sessions li")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.id") == "skip"
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "question"
    page.keyboard.type(QUESTION)
    page.keyboard.press("Shift+Enter")
    assert page.input_value("#question").endswith("\n")
    page.keyboard.press("Enter")
    page.wait_for_selector(".turn.whole")
    page.focus(".chip[data-number='1']")
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "drawer-title"
    assert page.locator("#drawer-title").inner_text() == "Source 1"
    page.keyboard.press("Escape")
    assert page.locator("#drawer").is_hidden()
    # the focus is back on the chip
    assert page.evaluate("document.activeElement.dataset.number") == "1"
    page.focus(".strip [tabindex='0']")
    first = page.locator(".strip-detail").inner_text()
    page.keyboard.press("ArrowRight")
    assert page.locator(".strip-detail").inner_text() != first
    assert page.evaluate("document.activeElement.dataset.kind") == "chunk"
    page.keyboard.press("Enter")
    assert page.locator("#drawer").is_visible()
    page.keyboard.press("Escape")
    assert page.evaluate("document.activeElement.dataset.kind") == "chunk"
    page.focus(".measure")
    page.keyboard.press("Enter")
    page.wait_for_selector(".comparison")
    page.keyboard.press("Escape")  # nothing is open, and no answer is being written
    assert page.evaluate("document.activeElement.id") == "question"


def test_every_control_is_reached_by_tab_with_a_visible_focus(asked: Any) -> None:
    ask(asked)
    asked.click("#how summary")
    asked.click(".chip >> nth=0")
    asked.wait_for_selector(".source-text")
    asked.evaluate("document.activeElement.blur(); document.body.focus()")
    wanted = asked.evaluate("probes.reachable().length")
    for _ in range(wanted + 6):
        asked.keyboard.press("Tab")
        shown = asked.evaluate("probes.focused()")
        assert shown is None or shown[1], shown
    assert wanted >= 30 and asked.evaluate("probes.missed()") == []


def test_every_control_has_a_name(asked: Any) -> None:
    ask(asked)
    asked.click("#documents")
    asked.wait_for_selector(".documents li")
    assert asked.evaluate("probes.nameless()") == []


@pytest.mark.parametrize("width", [360, 768, 1920])
def test_nothing_overflows_the_page_at_any_width(asked: Any, width: int) -> None:
    asked.set_viewport_size({"width": width, "height": 740})
    asked.reload()
    asked.wait_for_selector(".welcome h1")
    ask(asked)
    if width == 360:
        asked.click(".made > summary")
    asked.click(".measure")
    asked.wait_for_selector(".comparison")
    asked.evaluate("document.querySelector('#how').open = true")
    assert asked.evaluate("probes.outside()") == [width, []]
    for what in ("#documents", ".chip >> nth=0"):
        asked.click(what)
        asked.wait_for_selector("#drawer:not([hidden])")
        assert asked.evaluate("probes.outside()") == [width, []]
        asked.click("#drawer-close")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_text_on_the_page_has_enough_contrast(asked: Any, scheme: str) -> None:
    asked.emulate_media(color_scheme=scheme)
    found = [asked.evaluate("probes.contrasts()")]
    ask(asked)
    asked.click(".measure")
    asked.wait_for_selector(".comparison")
    asked.click("#how summary")
    asked.click(".answer .cite >> nth=0")
    found.append(asked.evaluate("probes.contrasts()"))
    asked.watch.allowed.append("Failed to load resource")
    asked.route("**/v1/ask", lambda route: route.abort())
    put(asked)
    asked.wait_for_selector(".notice.bad")
    asked.click("#documents")
    asked.wait_for_selector(".documents li")
    found.append(asked.evaluate("probes.contrasts()"))
    assert [one["poor"] for one in found] == [[], [], []]
    assert [one["texts"] > 10 for one in found] == [True, True, True]


def test_the_pages_content_security_policy_forbids_outside_resources(asked: Any) -> None:
    policy = asked.request.get("/").headers["content-security-policy"]
    assert "default-src 'self'" in policy and "unsafe" not in policy
    asked.watch.allowed.append("Content Security Policy")
    assert asked.evaluate("probes.inject()") is None
