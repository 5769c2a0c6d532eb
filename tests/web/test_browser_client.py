"""The example in clients/browser, built by npm, streams from a gateway of another origin."""

from __future__ import annotations

import asyncio
import functools
import http.server
import re
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx
import pytest
import pytest_asyncio
from playwright.async_api import Browser, Page, expect

from tests.web.site_rig import Site, npm

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.slow]

# Greedy decoding continues this prompt without an end.
REPEATING = "x = [1, 2, 3]\n" * 6
# The browser calls an observer once for all changes in a turn of the page's event loop.
_COUNT_UPDATES = """() => {
  window.updates = 0;
  const observer = new MutationObserver(() => { updates += 1; });
  observer.observe(document.querySelector("pre"), { childList: true });
}"""
every_protocol = pytest.mark.parametrize("protocol", ["Connect", "gRPC-Web"])


@pytest.fixture(scope="session")
def example_url(npm_packages: Path) -> Iterator[str]:
    """Yield the page's address, which has another port than the gateway."""
    npm("run", "build")
    handler = functools.partial(_QuietHandler, directory=str(npm_packages.parent / "dist"))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


class _QuietHandler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        """Log nothing."""


@pytest_asyncio.fixture(loop_scope="session")
async def example(browser: Browser, example_url: str, site: Site) -> AsyncIterator[Page]:
    """Yield the example's page, with the gateway's address filled in."""
    page = await browser.new_page()
    await page.goto(example_url)
    await page.get_by_label("Gateway").fill(site.url)
    yield page
    await page.close()


async def run(page: Page, protocol: str, **fields: str) -> None:
    await page.get_by_label("Protocol").select_option(protocol)
    for name, value in fields.items():
        await page.get_by_label(name.capitalize()).fill(value)
    await page.get_by_role("button", name="Run").click()


async def text(page: Page) -> str:
    return await page.locator("pre").inner_text()


async def running(site: Site) -> float:
    """Return the number of sequences in the verifier's batch."""
    async with httpx.AsyncClient(timeout=60) as http:
        metrics = (await http.get(site.verifier_metrics)).text
    found = re.search(r"^outrider:num_requests_running\S* (\S+)$", metrics, re.MULTILINE)
    return float(found[1]) if found else 0.0


async def nothing_runs(site: Site) -> None:
    async with asyncio.timeout(15):
        # The state of another process has no event to wait for.
        while await running(site):  # noqa: ASYNC110
            await asyncio.sleep(0.05)


@every_protocol
async def test_the_page_streams_the_text_that_http_gives(
    example: Page, site: Site, protocol: str
) -> None:
    await example.evaluate(_COUNT_UPDATES)
    await run(example, protocol, prompt=REPEATING, tokens="200")
    await expect(example.get_by_role("status")).to_have_text("LENGTH: 200 tokens", timeout=30_000)
    assert await example.evaluate("updates") > 10
    asked = {"prompt": REPEATING, "max_tokens": 200, "temperature": 0}
    answer = await example.request.post(f"{site.url}/v1/completions", data=asked)
    assert await text(example) == (await answer.json())["choices"][0]["text"]


@every_protocol
async def test_cancelling_frees_the_sequence_at_the_verifier(
    example: Page, site: Site, protocol: str
) -> None:
    await run(example, protocol, prompt=REPEATING, tokens="1900")
    await expect(example.locator("pre")).not_to_be_empty()
    assert await running(site) == 1
    await example.get_by_role("button", name="Cancel").click()
    await expect(example.get_by_role("status")).to_contain_text("Canceled")
    await nothing_runs(site)
    shown = await text(example)
    await asyncio.sleep(0.3)
    assert await text(example) == shown


@every_protocol
async def test_the_page_shows_reason_and_field_of_bad_input(example: Page, protocol: str) -> None:
    await run(example, protocol, tokens="0")
    status = example.get_by_role("status")
    await expect(status).to_contain_text("InvalidArgument: max_tokens must be")
    await expect(status).to_contain_text(
        "reason: INVALID_VALUE\nfield: max_tokens", use_inner_text=True
    )
