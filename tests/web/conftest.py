"""A real stack behind a gateway, and a real browser in front of it."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx
import pytest
import pytest_asyncio
from playwright.async_api import Browser, Page, async_playwright

sys.path.insert(0, str(Path(__file__).parents[1] / "e2e"))

from site_rig import EXAMPLE, Site, npm  # lies beside this file

# What the browser says of answers that tests ask for: a refusal, and a gateway that is gone.
_PROVOKED = (
    "400 (Bad Request)",
    # A gateway that is killed may be in the middle of any answer, or at its beginning.
    "ERR_CONNECTION_REFUSED",
    "ERR_CONNECTION_RESET",
    "ERR_EMPTY_RESPONSE",
    "ERR_CONTENT_LENGTH_MISMATCH",
    "ERR_INCOMPLETE_CHUNKED_ENCODING",
)


@pytest.fixture(scope="session")
def site() -> Iterator[Site]:
    made = Site()
    try:
        deadline = time.monotonic() + 60
        while not _ready(made.url):
            assert time.monotonic() < deadline, made.gateway.output()
            time.sleep(0.2)
        yield made
    finally:
        made.stop()


@pytest.fixture(scope="session")
def npm_packages() -> Path:
    """Where npm has put what the example page needs."""
    npm("install", "--no-audit", "--no-fund")
    return EXAMPLE / "node_modules"


def _ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/readyz").status_code == 200
    except httpx.TransportError:
        return False


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def browser() -> AsyncIterator[Browser]:
    path = (
        shutil.which("chromium")
        or shutil.which("chromium-browser")
        or shutil.which("google-chrome")
    )
    assert path is not None, "no Chromium on this machine; `make test` installs one"
    async with async_playwright() as playwright:
        # Containers and root have no user namespaces for Chromium's sandbox, and only our own page is opened.
        browser = await playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        await browser.close()


@pytest_asyncio.fixture(loop_scope="session")
async def page(browser: Browser, site: Site) -> AsyncIterator[Page]:
    """The page, as a person on a desk sees it first. Nothing may be written to the console as an error, or come from elsewhere."""
    context = await browser.new_context(viewport={"width": 1280, "height": 900})
    page = await context.new_page()
    problems: list[str] = []
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on(
        "console",
        lambda message: problems.append(message.text) if message.type == "error" else None,
    )
    page.on(
        "request",
        lambda request: (
            problems.append(request.url) if not request.url.startswith(site.url) else None
        ),
    )
    await page.goto(site.url)
    await page.locator(".process strong", has_text="ngram-1").wait_for()
    yield page
    await context.close()
    assert not [problem for problem in problems if not any(word in problem for word in _PROVOKED)]
