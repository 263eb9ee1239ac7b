"""Takes pictures of the page for people to look at: `python -m tests.api.page.screenshots FOLDER`.

The service is real: the bundled reader with a temporary home. Viewports and themes: light, dark, phone, wide.
"""

import itertools
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, Page, sync_playwright

from .conftest import CHROMIUM, CORPUS, QUESTION, serve
from .helpers import refusal, stream, streaming

LOOKS: dict[str, dict[str, Any]] = {
    "light": {"viewport": {"width": 1360, "height": 860}, "color_scheme": "light"},
    "dark": {"viewport": {"width": 1360, "height": 860}, "color_scheme": "dark"},
    "phone": {"viewport": {"width": 360, "height": 740}, "color_scheme": "light", "has_touch": True},
    "phone-dark": {"viewport": {"width": 360, "height": 740}, "color_scheme": "dark", "has_touch": True},
    "wide": {"viewport": {"width": 1920, "height": 1080}, "color_scheme": "light"},
}
Shot = Callable[[str], None]  # takes a picture of that name
HALF = stream(("token", {"text": "Kiralus works as a"}))
BUSY = refusal(503, "64 requests are running already; ask again.", {"Retry-After": "9"})


def answered(page: Page) -> None:
    page.wait_for_selector(".turn:last-child:not(.working)")
    page.wait_for_timeout(500)


def ask(page: Page, question: str) -> None:
    page.fill("#question", question)
    page.press("#question", "Enter")
    answered(page)


def take(browser: Browser, address: str, folder: Path, name: str) -> None:
    """Take pictures of every state of the page in one viewport and theme."""
    page = browser.new_context(base_url=address, **LOOKS[name]).new_page()
    numbers = itertools.count(1)

    def shot(what: str) -> None:
        page.mouse.move(0, 0)
        page.wait_for_timeout(300)
        page.screenshot(path=folder / f"{name}-{next(numbers)}-{what}.png")

    while not page.request.post("/v1/collections", data={"name": name}).ok:
        page.wait_for_timeout(500)  # the model is being loaded
    page.goto(f"/#collection={name}")
    small = LOOKS[name]["viewport"]["width"] < 760
    take_examples(page, shot, small)
    page.goto("about:blank")
    page.goto(f"/#collection={name}")
    take_documents(page, shot)
    take_answer(page, shot, small)
    take_conversations(page, shot, small)
    take_failures(page, shot)
    page.context.close()


def take_examples(page: Page, shot: Shot, small: bool) -> None:
    page.wait_for_selector(".welcome .try")
    page.wait_for_selector(".tier", state="attached")
    shot("empty")
    page.click(".try")
    page.wait_for_selector(".tries")
    shot("examples")
    page.locator(".tries button").first.click()
    answered(page)
    shot("example-answer")
    if small:
        page.locator(".made > summary").click()
        shot("example-report")
    page.click(".measure")
    page.wait_for_selector(".comparison")
    page.locator(".comparison").scroll_into_view_if_needed()
    shot("example-measured")


def choose(page: Page, field: str, value: str) -> None:
    page.click("#how summary")
    page.select_option(field, value)
    page.click("#how summary")


def take_documents(page: Page, shot: Shot) -> None:
    page.locator(".welcome input[type=file]").set_input_files([str(path) for path in CORPUS])
    page.wait_for_function("() => document.querySelectorAll('.result.good').length >= 4")
    shot("uploading")
    page.wait_for_function("() => document.querySelectorAll('.result.good').length === 10")
    page.wait_for_selector(".documents li")
    shot("ingested")
    page.click("#drawer-close")
    shot("ready")


def take_answer(page: Page, shot: Shot, small: bool) -> None:
    choose(page, "#reuse", "prefix")
    ask(page, QUESTION)
    if small:
        page.locator(".made > summary").last.click()
    page.locator(".why").scroll_into_view_if_needed()
    shot("not-reused")
    choose(page, "#reuse", "fused")
    if small:
        page.click("#menu")
    page.click("#new-session")
    ask(page, QUESTION)
    shot("answer")
    if small:
        page.locator(".made > summary").last.click()
    page.click(".measure")
    page.wait_for_selector(".comparison")
    page.locator(".strip .opens").nth(2).focus()
    shot("measured")
    page.locator(".answer .cite").first.click()
    shot("source")
    page.click("#drawer-close")


def take_conversations(page: Page, shot: Shot, small: bool) -> None:
    ask(page, "What instrument does he play?")
    if small:
        page.click("#menu")
        page.wait_for_timeout(300)
    page.locator(".session.current .square").click()
    shot("conversations")
    if small:
        page.keyboard.press("Escape")
    page.click("#how summary")
    page.wait_for_timeout(300)
    shot("settings")
    page.select_option("#selector", "none")
    shot("settings-selector")
    page.select_option("#selector", "")
    page.check("input[name=ratio][value=own]")
    page.locator("#ratio").fill("0.3")
    shot("settings-fixed")
    page.click("#how summary")


def take_failures(page: Page, shot: Shot) -> None:
    streaming(page, HALF)
    ask(page, "And who is the pilot?")
    shot("broken")
    page.unroute("**/v1/ask")
    page.route("**/v1/ask", lambda route: route.fulfill(**BUSY))
    page.fill("#question", "And who is the pilot?")
    page.press("#question", "Enter")
    page.wait_for_selector(".notice.waiting")
    shot("waiting")
    page.click("#stop")
    page.evaluate("document.activeElement.blur()")
    page.keyboard.press("?")
    shot("shortcuts")
    page.keyboard.press("Escape")
    page.route("**/v1/**", lambda route: route.fulfill(**refusal(401, "no")))
    page.reload()
    page.get_by_role("dialog").wait_for()
    shot("key")


def main() -> None:
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory() as home,
        sync_playwright() as playwright,
        serve(Path(home) / "home") as address,
    ):
        browser = playwright.chromium.launch(executable_path=str(CHROMIUM), args=["--no-sandbox"])
        for name in sys.argv[2:] or LOOKS:
            take(browser, address, folder, name)
        browser.close()


if __name__ == "__main__":
    main()
