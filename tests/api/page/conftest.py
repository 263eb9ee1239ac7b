"""The real service in its own process, and Debian's Chromium showing its page; without them the
tests are skipped.
"""

import importlib.util
import re
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.api.serving import process

CHROMIUM = Path("/usr/bin/chromium")
ROOT = Path(__file__).parents[3]
CORPUS = sorted((ROOT / "tests" / "world" / "corpus").glob("*.md"))
QUESTION = "By what other name is Kiralus known?"
TIMEOUT_MS = 20_000
PROBES = Path(__file__).parent / "probes.js"


def lacking() -> str | None:
    """What is missing to run the page's tests, and how to install it."""
    for module, extra in (
        ("playwright", "playwright"),
        ("fastapi", "'ragkv[api]'"),
        ("uvicorn", "'ragkv[api]'"),
    ):
        if importlib.util.find_spec(module) is None:
            return f"{module} is not installed: pip install {extra}"
    return None if CHROMIUM.exists() else f"there is no {CHROMIUM}: install Debian's chromium"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the tests that need a browser if something is missing."""
    if (reason := lacking()) is None:
        return
    for item in items:
        if Path(__file__).parent in item.path.parents and "browser" in getattr(
            item, "fixturenames", ()
        ):
            item.add_marker(pytest.mark.skip(reason=reason))


@dataclass
class Watch:
    """The requests and console errors of a page."""

    origin: str
    # patterns of console errors that the test provokes
    allowed: list[str] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)
    requests: list[Any] = field(default_factory=list)

    def paths(self, part: str) -> list[str]:
        """The paths of requests whose URL contains `part`."""
        return [urlsplit(request.url).path for request in self.requests if part in request.url]

    def check(self) -> None:
        """Assert that there was no unexpected error and no request to another address."""
        unexpected = [
            said
            for said in self.complaints
            if not any(re.search(one, said) for one in self.allowed)
        ]
        assert unexpected == []
        assert {
            request.url for request in self.requests if not request.url.startswith(self.origin)
        } == set()


@pytest.fixture(scope="package")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a service on the small reader, with an empty home."""
    with serve(tmp_path_factory.mktemp("page") / "home") as url:
        yield url


@contextmanager
def serve(home: Path) -> Iterator[str]:
    """Run `ragkv serve`; yields its URL."""
    command = [sys.executable, "-m", "ragkv", "serve", "--home", str(home), "--port", "0"]
    with process(command, {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}) as server:
        yield server.url


# closed with the package: while it is open, no other event loop can run
@pytest.fixture(scope="package")
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=str(CHROMIUM), args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="package")
def library(server: str, browser: Any) -> str:
    """A collection with the example corpus."""
    context = browser.new_context(base_url=server)
    api = context.request
    for _ in range(240):
        if (made := api.post("/v1/collections", data={"name": "library"})).status != 503:
            break
        made.dispose()
        time.sleep(0.5)
    assert made.ok, made.text()
    documents = [
        {"id": path.name, "title": path.name, "text": path.read_text("utf-8").strip()}
        for path in CORPUS
    ]
    # the first documents wait for the model, which takes minutes on a busy machine
    added = api.post(
        "/v1/collections/library/documents", data={"documents": documents}, timeout=240_000
    )
    assert added.status == 201, added.text()
    context.close()
    return "library"


@pytest.fixture
def page(server: str, browser: Any) -> Iterator[Any]:
    """An empty tab of the service's origin. Its console errors and requests are checked at
    the end.
    """
    context = browser.new_context(base_url=server, viewport={"width": 1280, "height": 860})
    context.add_init_script(path=PROBES)
    page = context.new_page()
    page.set_default_timeout(TIMEOUT_MS)
    page.watch = watch = Watch(server)
    page.on(
        "console",
        lambda said: (
            watch.complaints.append(said.text) if said.type in ("error", "warning") else None
        ),
    )
    page.on("pageerror", lambda error: watch.complaints.append(str(error)))
    page.on("request", lambda request: watch.requests.append(request))
    yield page
    context.close()
    watch.check()


@pytest.fixture
def asked(page: Any, library: str) -> Any:
    """A tab on the collection `library`, ready for a question."""
    page.goto(f"/#collection={library}")
    page.wait_for_selector("#sessions li")
    return page
