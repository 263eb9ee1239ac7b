"""Takes page.png, and pictures of the page for a look at it, from a server: `python
docs/figures/page.py URL FOLDER`.

The server holds the example articles as its collection `default`. Needs playwright and Debian's
Chromium.
"""

import sys
from pathlib import Path

from playwright.sync_api import sync_playwright

QUESTION = "What did the company in Coalbrookdale build for Richard Trevithick in 1802?"


def main(url: str, folder: Path) -> None:
    with sync_playwright() as tools:
        browser = tools.chromium.launch(executable_path="/usr/bin/chromium")
        for name, scheme, width, height in (
            ("page", "light", 1180, 760),
            ("dark", "dark", 1180, 760),
        ):
            context = browser.new_context(
                color_scheme=scheme, viewport={"width": width, "height": height}
            )
            page = context.new_page()
            page.goto(f"{url}/#k=4")
            page.wait_for_selector(".tries button")
            page.screenshot(path=folder / f"empty-{scheme}.png")
            page.fill("#question", QUESTION)
            page.press("#question", "Enter")
            page.wait_for_selector(".turn.whole", timeout=240_000)
            page.wait_for_timeout(1_500)
            page.screenshot(path=folder / f"{name}.png")
            page.set_viewport_size({"width": 390, "height": 800})
            page.wait_for_timeout(500)
            page.screenshot(path=folder / f"phone-{scheme}.png")
            context.close()
        browser.close()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
