"""The example documents: offered to a first visitor, added by one click, with questions to
click.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from .conftest import ROOT, serve

QUESTIONS = [
    json.loads(line)
    for line in (ROOT / "examples" / "questions.jsonl").read_text("utf-8").splitlines()
]


@pytest.fixture(scope="module")
def visited(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a service that has no collection yet."""
    with serve(Path(tmp_path_factory.mktemp("first")) / "home") as url:
        yield url


def test_a_first_visitor_asks_an_example_in_two_clicks_and_any_collection_offers_questions(
    page: Any, visited: str
) -> None:
    page.watch.origin = visited
    page.watch.allowed.append("Failed to load resource")  # while the model is being loaded
    page.goto(visited)
    page.click(".welcome .try")
    # they wait for the model, which takes minutes on a busy machine
    page.wait_for_selector(".tries button", timeout=240_000)
    assert page.locator("#collection").input_value() == "examples"
    assert (
        page.locator("#document-count").inner_text() == "12"
        and page.locator("#model").inner_text() == "reader"
    )
    offered = page.locator(".tries button").all_inner_texts()
    assert len(offered) == 3 and set(offered) <= {one["question"] for one in QUESTIONS}
    page.locator(".tries button").first.focus()
    page.keyboard.press("Enter")
    page.wait_for_selector(".turn.whole")
    assert page.locator(".turn h3").inner_text() == offered[0]
    page.request.post(f"{visited}/v1/collections", data={"name": "own"})
    documents = [
        {"id": f"01-{name}.md", "text": f"{name} is a town."} for name in ("Marl", "Oro", "Irvburg")
    ]
    page.request.post(f"{visited}/v1/collections/own/documents", data={"documents": documents})
    page.goto(f"{visited}/#collection=own")
    page.reload()
    page.wait_for_selector(".tries button")
    asked = page.locator(".tries button").all_inner_texts()
    assert asked == [f"What does “{name}” say?" for name in ("Marl", "Oro", "Irvburg")]
