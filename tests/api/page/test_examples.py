"""The example documents: offered to a first visitor, added by one click, with questions to click."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from .conftest import ROOT, serve

ANSWERS = {
    one["question"]: one["answer"]
    for line in (ROOT / "examples" / "questions.jsonl").read_text("utf-8").splitlines()
    for one in [json.loads(line)]
}


@pytest.fixture(scope="module")
def visited(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a service that has no collection yet."""
    with serve(Path(tmp_path_factory.mktemp("first")) / "home") as url:
        yield url


@pytest.fixture
def first(page: Any, visited: str) -> Any:
    """A tab of a first visitor."""
    page.watch.origin = visited
    page.watch.allowed.append("Failed to load resource")  # while the model is being loaded
    page.request.delete(f"{visited}/v1/collections/examples")  # of the test before
    page.goto(visited)
    page.wait_for_selector(".welcome .try")
    return page


def test_a_first_visitor_gets_a_right_answer_in_two_clicks(first: Any) -> None:
    first.click(".try")
    first.wait_for_selector(".tries button")
    assert first.locator("#collection").input_value() == "examples"
    assert first.locator("#document-count").inner_text() == "10"
    question = first.locator(".tries button").first.inner_text()
    first.locator(".tries button").first.focus()
    first.keyboard.press("Enter")
    first.wait_for_selector(".turn.whole")
    assert first.evaluate("probes.answer()") == ANSWERS[question]
    assert first.locator(".turn h3").inner_text() == question
    assert first.locator(".legend .key[data-state=fused]").get_attribute("data-count") != "0"


def test_every_example_question_is_answered_rightly_by_the_bundled_reader(first: Any, visited: str) -> None:
    first.click(".try")
    first.wait_for_selector(".tries button")
    for question in first.locator(".tries button").all_inner_texts():
        body = {"question": question, "collection": "examples", "k": 6}
        said = first.request.post(f"{visited}/v1/ask", data=body).json()
        assert said["answer"].strip() == ANSWERS[question] != "unknown"
        assert said["citations"]
