"""The page's chat: an answer's thought, its content and its calls of tools apart."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from axe_playwright_python.async_playwright import Axe
from gateway_rig import Rig, echo, is_ready, model_with_template, running_rig, settings
from playwright.async_api import Browser, Page, expect
from scripted_verifier import Script, ready, serving
from waiting import until

from gateway.text.prompts import Prompts

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.slow]

TEMPLATE = (
    "{% for m in messages %}<|user|>{{ m.content }}<|end|>{% endfor %}"
    "{% if tools %}<tool_call>{{ tools | tojson }}{% endif %}"
    "<|assistant|>{% if enable_thinking is false %}<think></think>{% endif %}"
)
THOUGHT = "<think>\nI need 1 < 2 calls.\n</think>"
CONTENT = "Let me look."
WEATHER = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
TIME = '<tool_call>{"name": "get_time", "arguments": {\n  "city":  "Lima"}}</tool_call>'
ANSWER = f"{THOUGHT}\n\n{CONTENT}\n{WEATHER}\n{TIME}"


@pytest_asyncio.fixture(loop_scope="session")
async def thinker(tmp_path: Path) -> AsyncIterator[Rig]:
    """A gateway whose model thinks and calls tools."""
    model = model_with_template(tmp_path, TEMPLATE)
    prompts = Prompts(model)
    script = Script(ready(prompts.fingerprint), echo)
    async with (
        serving(script) as address,
        running_rig(settings(address, tokenizer=model), script, prompts) as rig,
    ):
        await until(lambda: is_ready(rig.http))
        yield rig


async def ask(page: Page, choice: str) -> None:
    await page.get_by_label("Endpoint").select_option(label="chat")
    await page.get_by_label("Tools").select_option(label=choice)
    await page.get_by_role("button", name="Run", exact=True).click()
    await expect(page.locator(".output dl:has(dd)")).to_have_count(1, timeout=60_000)


@pytest.mark.parametrize(
    ("scheme", "width", "chunk"), [("light", 360, 1), ("dark", 1280, 3), ("light", 1280, 1000)]
)
async def test_a_thought_content_and_calls_are_apart(
    browser: Browser, thinker: Rig, scheme: str, width: int, chunk: int
) -> None:
    thinker.says(ANSWER, chunk)
    context = await browser.new_context(
        viewport={"width": width, "height": 800},
        color_scheme=scheme,  # type: ignore[arg-type]  # it is one of the allowed strings
    )
    page = await context.new_page()
    await page.goto(thinker.gateway.http_url)
    await expect(page.locator("#status")).to_contain_text("ready")
    await ask(page, "the model's choice")
    texts = [text.strip() for text in await page.locator(".answer pre").all_inner_texts()]
    assert texts == [THOUGHT, CONTENT, WEATHER, TIME], "in the order of the answer"
    await expect(page.locator(".call code")).to_have_text(
        ['get_weather({"city": "Oslo"})', 'get_time({ "city": "Lima"})']
    )
    found = await Axe().run(page)
    assert found.violations_count == 0, found.generate_report()
    assert await page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    await page.get_by_text("Thought", exact=True).click()
    await expect(page.locator(".thought pre")).to_be_hidden()
    await page.locator(".answer").focus()
    await page.keyboard.press("ArrowRight")
    await expect(page.locator(".thought pre .current")).to_be_visible()
    await context.close()


async def test_an_answer_that_ends_in_what_may_be_a_mark_is_shown_whole(
    browser: Browser, thinker: Rig
) -> None:
    page = await browser.new_page()
    await page.goto(thinker.gateway.http_url)
    await expect(page.locator("#status")).to_contain_text("ready")
    for answer in ("1 <", "<tool", f"{WEATHER}\n"):
        thinker.says(answer)
        await ask(page, "the model's choice")
        assert (await page.locator(".answer pre").inner_text()).strip() == answer.strip()
    await page.close()


async def test_tools_are_offered_to_chats_alone(page: Page) -> None:
    await expect(page.get_by_label("Tools")).to_be_hidden()
    await page.get_by_label("Endpoint").select_option(label="chat")
    await expect(page.get_by_label("Tools")).to_have_value("none")
    await expect(page.locator("#offered")).to_be_hidden()
    await page.get_by_label("Tools").select_option(label="force a call")
    await expect(page.locator("#offered")).to_contain_text("get_weather(city, unit)")
    await page.get_by_role("button", name="code", exact=True).click()
    await expect(page.get_by_label("Tools")).to_be_hidden()
    await expect(page.locator("#offered")).to_be_hidden()


async def test_the_bundled_model_shows_a_forced_call_and_who_drafted_it(page: Page) -> None:
    await page.get_by_role("button", name="tool call (chat)").click()
    await page.get_by_role("button", name="Run beside plain decoding").click()
    await expect(page.locator("#verdict")).to_contain_text("identical", timeout=60_000)
    await expect(page.locator(".call code").first).to_have_text(
        re.compile(r'^get_(weather|time)\(\{\s*"city"\s*: "(Lima|Oslo|Tokyo)".*\}\)$', re.DOTALL)
    )
    assert await page.locator(".call").count() == 2, "one call in each text"
    written = await page.locator(".call pre").first.inner_text()
    assert written.startswith("<tool_call>")
    assert written.rstrip().endswith("</tool_call>")
    await page.locator(".call .token.accepted").first.hover()
    await expect(page.get_by_role("tooltip")).to_have_text("accepted: guessed by ngram-1")
