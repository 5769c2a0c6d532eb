"""Takes the pictures in docs/observability.md, which show the gateway's page.

Run `python docs/take_screenshots.py http://127.0.0.1:8000`. Needs the dev extra, Chromium, and the
stack that `make serve` starts. For one picture the script kills an n-gram drafter, and `make serve`
starts it again.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from playwright.sync_api import Page, sync_playwright

IMAGES = Path(__file__).with_name("images")
LONG_MS = 120_000


def main(url: str) -> None:
    """Take every picture."""
    IMAGES.mkdir(exist_ok=True)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox"]
        )
        for name, (width, height, scheme, act) in SHOTS.items():
            page = browser.new_page(
                viewport={"width": width, "height": height}, color_scheme=scheme
            )
            page.set_default_timeout(LONG_MS)
            page.goto(url)
            page.locator(".process").nth(3).wait_for()
            act(page)
            page.screenshot(path=IMAGES / f"{name}.png")
            page.close()
        browser.close()


def both_ways(page: Page) -> None:
    """Write one text both ways: the page's first button does this."""
    page.locator("#compare").click()
    page.locator("#same.good").wait_for()


def pointed(page: Page) -> None:
    """Write one text both ways, and point at a token."""
    both_ways(page)
    page.locator(".token.accepted").nth(6).hover()


def several(page: Page) -> None:
    """Write four texts at once, which share a timeline."""
    page.locator("#several").click()
    page.locator("#stop:disabled").wait_for(state="attached")
    page.locator("#same", has_text="tokens a second").wait_for()


def chat(page: Page) -> None:
    """Send a chat's two preset messages; the answer to the second calls a tool."""
    form = page.locator("#chat")
    for preset in form.locator(".presets button").all():
        preset.click()
        form.get_by_role("button", name="Send").click()
        form.get_by_role("button", name="Send").wait_for()
    page.locator("#chat-title").evaluate("title => title.scrollIntoView()")


def loss(page: Page) -> None:
    """Kill a drafter while it drafts, and wait until it is back."""
    example = page.locator("#example-leave")
    example.get_by_role("button", name="Start the text").click()
    page.locator("#example-output .token").nth(100).wait_for(state="attached")
    subprocess.run(example.locator("code").first.inner_text(), shell=True, check=True)
    example.locator(".outcome", has_text="It was back").wait_for()
    page.wait_for_timeout(3000)
    page.locator("#examples-title").evaluate("title => title.scrollIntoView()")


SHOTS: dict[str, tuple[int, int, str, Callable[[Page], None]]] = {
    "playground": (1440, 900, "light", pointed),
    "several": (1440, 900, "dark", several),
    "chat": (1440, 900, "light", chat),
    "loss": (1440, 900, "dark", loss),
    "phone": (390, 844, "light", both_ways),
    "phone-dark": (390, 844, "dark", both_ways),
}


if __name__ == "__main__":
    main(sys.argv[1])
