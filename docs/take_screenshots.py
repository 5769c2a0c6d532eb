"""Takes the pictures of the page that docs/observability.md shows.

Run `python docs/take_screenshots.py http://127.0.0.1:8000`. Needs the dev extra, Chromium, and a
stack with an n-gram drafter and a draft model, as `make serve` starts it.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from playwright.sync_api import Page, sync_playwright

IMAGES = Path(__file__).with_name("images")
SHOTS = {
    "playground": (1280, 1000, "light"),
    "dark": (1280, 1000, "dark"),
    "phone": (390, 844, "light"),
}


def main(url: str) -> None:
    """Every picture, of the same prompt."""
    IMAGES.mkdir(exist_ok=True)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox"]
        )
        for name, (width, height, scheme) in SHOTS.items():
            page = browser.new_page(
                viewport={"width": width, "height": height}, color_scheme=scheme
            )
            page.goto(url)
            page.locator(".process").nth(3).wait_for()
            run(page, beside_plain=name != "phone")
            page.screenshot(path=IMAGES / f"{name}.png", full_page=name != "phone")
        browser.close()


def run(page: Page, *, beside_plain: bool) -> None:
    """Run the prompt a few times to fill the charts, then point at a token."""
    button = page.locator("#compare" if beside_plain else "#run")
    for _ in range(4):
        button.click()
        page.locator("#stop:disabled").wait_for(state="attached")
        page.wait_for_timeout(1500)
    token = page.locator(".token.accepted").nth(6)
    token.scroll_into_view_if_needed()
    token.hover()
    if not beside_plain:
        page.locator("#outputs").evaluate("element => element.scrollIntoView()")


if __name__ == "__main__":
    main(sys.argv[1])
