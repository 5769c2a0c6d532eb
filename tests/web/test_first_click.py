"""The first click on the page, with a target at whose size drafts save time."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.async_api import Browser, Locator, expect
from site_rig import Site
from stack import ROOT, TARGET

from outrider.launch.grow import modest_checkpoint

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.slow]

TRIES = 5
HEIGHT = 900


@pytest.fixture(scope="module")
def gaining_site() -> Iterator[Site]:
    """The processes that `make serve` starts, with its target."""
    grown = ROOT / "grown/target-154m"
    modest_checkpoint(Path(TARGET), grown)
    made = Site("--target", str(grown), "--dtype", "bfloat16")
    try:
        made.stack.add_drafter("model-1", "model", "--dtype", "bfloat16")
        made.stack.wait_ready()
        made.gateway.wait_ready()
        yield made
    finally:
        made.stop()


async def is_above_the_fold(shown: Locator) -> bool:
    box = await shown.bounding_box()
    return box is not None and box["y"] >= 0 and box["y"] + box["height"] <= HEIGHT


async def first_click(browser: Browser, site: Site) -> float:
    """Open the page and click once. Returns how many times as fast the drafted text was."""
    page = await browser.new_page(viewport={"width": 1440, "height": HEIGHT})
    await page.goto(site.url)
    await expect(page.locator("#status")).to_have_text("ready")
    await page.get_by_role("button", name="Run it both ways").click()
    await expect(page.locator("#same")).to_have_text("identical text", timeout=120_000)
    drafted, plain = page.locator(".output").nth(0), page.locator(".output").nth(1)
    for shown in (page.locator(".facts"), page.locator(".legend"), drafted, plain):
        assert await is_above_the_fold(shown)
    assert await page.evaluate("scrollY") == 0
    guessed = drafted.locator(".token[class*='by-']")
    assert await guessed.count() > await drafted.locator(".token").count() / 2
    assert await is_above_the_fold(guessed.first)
    colors = {
        await token.evaluate("token => getComputedStyle(token).backgroundColor")
        for token in (guessed.first, plain.locator(".token").first)
    }
    assert len(colors) == 2
    ratio = float((await page.locator("#factor").inner_text()).removesuffix("×"))
    await page.close()
    return ratio


async def test_the_first_click_shows_a_gain_and_who_wrote_the_tokens(
    browser: Browser, gaining_site: Site
) -> None:
    ratios = [await first_click(browser, gaining_site) for _ in range(TRIES)]
    assert sum(ratio >= 1.5 for ratio in ratios) >= TRIES - 1, ratios
