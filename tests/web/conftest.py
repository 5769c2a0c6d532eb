"""Fixtures: a real stack behind a gateway, and a real browser."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio
from playwright.async_api import Browser, ConsoleMessage, Page, Request

from tests.web.site_rig import EXAMPLE, Site, chromium, npm

# Messages of the browser that tests provoke with a refused request or a killed gateway.
_PROVOKED = (
    "400 (Bad Request)",
    # A gateway may be killed at any point of an answer.
    "ERR_CONNECTION_REFUSED",
    "ERR_CONNECTION_RESET",
    "ERR_EMPTY_RESPONSE",
    "ERR_CONTENT_LENGTH_MISMATCH",
    "ERR_INCOMPLETE_CHUNKED_ENCODING",
)


@pytest.fixture(scope="session")
def site() -> Iterator[Site]:
    # Whether a draft pays depends on the machine, so always draft.
    made = Site("--always-draft")
    try:
        made.gateway.wait_ready()
        yield made
    finally:
        made.stop()


@pytest.fixture(scope="session")
def npm_packages() -> Path:
    """Return the folder of the example page's npm packages."""
    npm("install", "--no-audit", "--no-fund")
    return EXAMPLE / "node_modules"


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def browser() -> AsyncIterator[Browser]:
    async with chromium() as found:
        yield found


@pytest_asyncio.fixture(loop_scope="session")
async def page(browser: Browser, site: Site) -> AsyncIterator[Page]:
    """Yield the site's page in a window of a desktop's size.

    The test fails if there are requests to other hosts, or errors that no test provokes.
    """
    context = await browser.new_context(viewport={"width": 1280, "height": 900})
    page = await context.new_page()
    problems: list[str] = []

    def on_console(message: ConsoleMessage) -> None:
        if message.type == "error":
            problems.append(message.text)

    def on_request(request: Request) -> None:
        if not request.url.startswith(site.url):
            problems.append(request.url)

    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("console", on_console)
    page.on("request", on_request)
    await page.goto(site.url)
    await page.locator("#map").get_by_text("ngram-1", exact=True).wait_for()
    yield page
    await context.close()
    assert not [problem for problem in problems if not any(word in problem for word in _PROVOKED)]
