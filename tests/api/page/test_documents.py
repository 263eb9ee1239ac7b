"""Dropped, picked and pasted documents: progress, results, the list, deleting. Against the real
service.
"""

from pathlib import Path
from typing import Any

import pytest

from .conftest import CORPUS
from .helpers import ask


def said(page: Any) -> dict[str, str]:
    """The result of each document that was just added."""
    rows = page.locator(".result").all()
    return {row.get_attribute("data-name"): row.locator(".said").inner_text() for row in rows}


def settled(page: Any, documents: int) -> None:
    page.wait_for_function(
        "n => document.querySelectorAll('.result:is(.good, .bad)').length === n", arg=documents
    )
    page.wait_for_function("() => !document.querySelector('.result.now')")


@pytest.fixture
def fresh(page: Any, library: str, request: pytest.FixtureRequest) -> Any:
    """A tab on a new collection that was created on the page."""
    name = request.node.name.replace("[", "-").replace("]", "")[-60:].lstrip("_-")
    page.goto(f"/#collection={library}")
    page.wait_for_selector("#sessions li")
    page.select_option("#collection", label="New collection …")
    page.get_by_label("Name", exact=True).fill(name)
    page.keyboard.press("Enter")
    page.wait_for_function("name => document.querySelector('#collection').value === name", arg=name)
    page.collection = name
    return page


def test_each_picked_file_is_added_with_its_own_result(fresh: Any) -> None:
    with fresh.expect_file_chooser() as chooser:
        fresh.locator(".pick-files").click()
    chooser.value.set_files([str(path) for path in CORPUS[:3]])
    settled(fresh, 3)
    assert said(fresh).keys() == {path.name for path in CORPUS[:3]}
    assert all(result.startswith("added") for result in said(fresh).values())
    assert fresh.locator(".uploads [role=status]").inner_text() == "3 done"
    fresh.locator(".documents li").nth(2).wait_for()
    assert fresh.locator("#document-count").inner_text() == "3"
    held = fresh.request.get(f"/v1/collections/{fresh.collection}/documents").json()["data"]
    shown = fresh.locator(".documents li").evaluate_all("rows => rows.map(row => row.dataset.id)")
    assert shown == [one["id"] for one in held]


def test_dropped_files_are_added(fresh: Any) -> None:
    fresh.evaluate("probes.drag('odd.txt', 'The cellist of Odd lives in Even.')")
    assert fresh.locator("#dropping").is_visible()
    assert fresh.locator("#dropping-to").inner_text() == fresh.collection
    assert fresh.evaluate("probes.drop()")  # otherwise the browser would open the file
    settled(fresh, 1)
    assert fresh.locator("#dropping").is_hidden()
    assert said(fresh)["odd.txt"].startswith("added")


def test_pasted_text_is_added_and_unchanged_the_second_time(fresh: Any) -> None:
    for expected in ("added", "already here"):
        fresh.locator(".paste").last.click()
        fresh.get_by_label("Title").fill("Notes")
        fresh.get_by_label("Text", exact=True).fill("The tuba of Odd is green.")
        fresh.get_by_role("button", name="Add", exact=True).click()
        # until then the previous result is shown
        fresh.locator(".result .said", has_text=expected).wait_for()
        settled(fresh, 1)
        assert said(fresh)["Notes"].startswith(expected)
    assert fresh.locator("#document-count").inner_text() == "1"


def test_a_file_of_a_wrong_type_is_reported_and_the_others_are_added(
    fresh: Any, tmp_path: Path
) -> None:
    fresh.watch.allowed.append("Failed to load resource")
    wrong = tmp_path / "tool.exe"
    wrong.write_bytes(b"MZ\0\1")
    fresh.locator(".drop input[type=file]").first.set_input_files([str(wrong), str(CORPUS[0])])
    settled(fresh, 2)
    assert ".exe" in said(fresh)["tool.exe"] or "kind of file" in said(fresh)["tool.exe"]
    assert said(fresh)[CORPUS[0].name].startswith("added")
    assert fresh.locator(".uploads [role=status]").inner_text() == "1 done, 1 failed"


def test_a_document_is_deleted_after_a_confirmation(fresh: Any) -> None:
    fresh.locator(".drop input[type=file]").first.set_input_files(
        [str(path) for path in CORPUS[:2]]
    )
    settled(fresh, 2)
    fresh.get_by_role("button", name=f"Delete {CORPUS[0].name}").click()
    fresh.get_by_role("button", name="Cancel").click()
    assert fresh.locator(".documents li").count() == 2
    fresh.get_by_role("button", name=f"Delete {CORPUS[0].name}").click()
    fresh.get_by_role("dialog").get_by_role("button", name="Delete").click()
    fresh.wait_for_function("() => document.querySelectorAll('.documents li').length === 1")
    held = fresh.request.get(f"/v1/collections/{fresh.collection}/documents").json()["data"]
    assert [one["title"] or one["id"] for one in held] == [CORPUS[1].name]


def test_a_collection_is_deleted_after_a_confirmation(fresh: Any) -> None:
    fresh.click("#documents")
    fresh.get_by_role("button", name="Delete collection …").click()
    fresh.get_by_role("dialog").get_by_role("button", name="Delete").click()
    fresh.wait_for_function(
        "name => document.querySelector('#collection').value !== name", arg=fresh.collection
    )
    assert fresh.request.get(f"/v1/collections/{fresh.collection}").status == 404


@pytest.mark.usefixtures("server")
def test_the_first_document_creates_the_first_collection(page: Any) -> None:
    def empty(route: Any) -> None:
        route.fulfill(json={"data": []}) if route.request.method == "GET" else route.continue_()

    page.route("**/v1/collections", empty)
    page.goto("/")
    page.wait_for_selector(".welcome .drop")
    with page.expect_request(
        lambda asked: (asked.method, asked.url[-15:]) == ("POST", "/v1/collections")
    ) as made:
        page.locator(".welcome input[type=file]").set_input_files(str(CORPUS[0]))
    assert made.value.post_data_json == {"name": "default"}
    page.unroute("**/v1/collections")
    settled(page, 1)


EVIL = (
    'Evilword is here. <img src="/nowhere.png" onerror="broken = 1"><script>broken = '
    "1</script> <b>Bold.</b>"
)


def test_markup_in_documents_questions_and_names_is_shown_as_text(fresh: Any) -> None:
    name = '<img src=x onerror="broken=2">.txt'
    evil = {"id": name, "title": name, "text": EVIL}
    fresh.request.post(f"/v1/collections/{fresh.collection}/documents", data={"documents": [evil]})
    fresh.reload()
    fresh.wait_for_selector(".welcome h1")
    said = ask(fresh, "Where is <img src=x onerror='broken=3'> Evilword written?")
    assert EVIL in said["sources"][0]["text"]
    fresh.locator(".chip").first.click()
    assert EVIL in fresh.locator(".source-text").inner_text()
    fresh.click("#documents")
    fresh.wait_for_selector(".documents li")
    assert fresh.locator(".documents li .name").inner_text() == name
    fresh.locator(".as-table summary").first.click()
    assert fresh.evaluate("window.broken ?? null") is None
    assert fresh.locator("img, body script, .source-text b").count() == 0
    asked = "Where is <img src=x onerror='broken=3'> Evilword written?"
    assert fresh.locator(".turn h3").inner_text() == asked
    assert fresh.locator(".session.current .title").inner_text() == asked  # as the server stores it
