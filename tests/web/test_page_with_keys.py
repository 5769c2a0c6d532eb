"""The page of a gateway with API keys: the browser asks for the key as a password."""

from __future__ import annotations

from pathlib import Path

import pytest
from playwright.async_api import Browser, expect

from gateway.text.prompts import Prompts
from tests.gateway.keyed_rig import ALICE, OPERATOR, entry, keyed_rig

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.slow]


async def test_the_page_works_with_a_key_as_the_password(browser: Browser, tmp_path: Path) -> None:
    prompts = Prompts("models/target")
    entries = [entry(ALICE, "alice"), entry(OPERATOR, "ops", role="operator")]
    async with keyed_rig(prompts, tmp_path, entries) as rig:
        rig.says("def f(x): return x")
        for key, verifier_count in ((ALICE, 0), (OPERATOR, 1)):
            context = await browser.new_context(
                http_credentials={"username": "me", "password": key}
            )
            page = await context.new_page()
            await page.goto(rig.gateway.http_url)
            await expect(page.locator("#status")).to_contain_text("ready")
            verifiers = page.locator(".process strong", has_text="verifier")
            await expect(verifiers).to_have_count(verifier_count)
            await page.get_by_role("button", name="Run", exact=True).click()
            await expect(page.locator(".output pre")).to_contain_text("def f(x)")
            await context.close()
