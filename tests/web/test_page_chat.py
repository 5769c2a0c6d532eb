"""The page's chat shows an answer's thought, content and tool calls separately."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from axe_playwright_python.async_playwright import Axe
from playwright.async_api import Browser, Page, expect

from tests.gateway.gateway_rig import Rig, rig_with_template

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
    """Yield a gateway whose model thinks and calls tools."""
    async with rig_with_template(tmp_path, TEMPLATE) as rig:
        yield rig


async def send(page: Page, text: str, tools: str = "none") -> None:
    """Send a message of the chat, and wait for the whole answer."""
    chat = page.locator("#chat")
    await chat.get_by_label("Tools").select_option(label=tools)
    await chat.get_by_label("Message", exact=True).fill(text)
    await chat.get_by_role("button", name="Send").click()
    await expect(chat.get_by_role("button", name="Stop")).to_have_count(0, timeout=60_000)
    await expect(chat.get_by_role("alert")).to_be_hidden()


def answers(rig: Rig, *texts: str, chunk: int = 1) -> None:
    """Let the verifier answer its next requests with these texts."""
    scripted = []
    for text in texts:
        rig.says(text, chunk)
        scripted.append(rig.script.answer)
    rest = iter(scripted)
    rig.script.answer = lambda request: next(rest)(request)


def prompt_of(rig: Rig, index: int) -> str:
    """Return the prompt of one of the verifier's requests."""
    ids = rig.script.requests[index].prompt
    return rig.prompts.tokenizer.decode(ids, skip_special_tokens=False)


@pytest.mark.parametrize(
    ("scheme", "width", "chunk"), [("light", 360, 1), ("dark", 1280, 3), ("light", 1280, 1000)]
)
async def test_a_thought_content_and_calls_are_apart(
    browser: Browser, thinker: Rig, scheme: str, width: int, chunk: int
) -> None:
    answers(thinker, ANSWER, "It rains.", chunk=chunk)
    context = await browser.new_context(
        viewport={"width": width, "height": 800},
        color_scheme=scheme,
    )
    page = await context.new_page()
    await page.goto(thinker.gateway.http_url)
    await expect(page.locator("#status")).to_contain_text("ready")
    await send(page, "Do I need a coat?", "the model's choice")
    texts = [text.strip() for text in await page.locator(".answer pre").all_inner_texts()]
    assert texts == [THOUGHT, CONTENT, WEATHER, TIME, "It rains."], "in the order of the answers"
    await expect(page.locator(".call code")).to_have_text(
        ['get_weather({"city": "Oslo"})', 'get_time({ "city": "Lima"})']
    )
    found = await Axe().run(page)
    assert found.violations_count == 0, found.generate_report()
    assert await page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    await page.get_by_text("Thought", exact=True).click()
    await expect(page.locator(".thought pre")).to_be_hidden()
    await page.locator("#chat .answer").first.focus()
    await page.keyboard.press("ArrowRight")
    await expect(page.locator(".thought pre .current")).to_be_visible()
    await context.close()


async def test_an_answer_that_ends_in_what_may_be_a_mark_is_shown_whole(
    browser: Browser, thinker: Rig
) -> None:
    page = await browser.new_page()
    await page.goto(thinker.gateway.http_url)
    await expect(page.locator("#status")).to_contain_text("ready")
    for answer in ("1 <", "<tool"):
        thinker.says(answer)
        await send(page, "x", "the model's choice")
        assert (await page.locator("#chat .answer pre").last.inner_text()).strip() == answer
    await page.close()


async def test_a_chat_has_a_history_a_system_prompt_and_the_results_of_calls(
    browser: Browser, thinker: Rig
) -> None:
    page = await browser.new_page()
    await page.goto(thinker.gateway.http_url)
    await expect(page.locator("#status")).to_contain_text("ready")
    chat = page.locator("#chat")
    await chat.get_by_label("System prompt").fill("Be brief.")
    answers(thinker, f"{THOUGHT}First.", WEATHER, "4 degrees.", "Third.", "New.")
    await send(page, "Hello")
    await send(page, "The weather?", "the model's choice")
    result = '{"city":"Oslo","temperature":4}'
    await expect(chat.locator(".tool")).to_have_text(f"get_weather → {result}")
    await chat.get_by_label("Thinking").select_option(label="off")
    await send(page, "Thanks")
    said = ("Be brief.", "Hello", "First.", "The weather?", result, "4 degrees.", "Thanks")
    seen = prompt_of(thinker, -1)
    assert sorted(said, key=seen.index) == list(said), "all messages in their order"
    assert "1 < 2" not in seen, "a thought is not sent back"
    assert seen.endswith("<think></think>")
    assert "<think>" not in prompt_of(thinker, -2)
    await chat.get_by_role("button", name="New chat").click()
    await send(page, "Who?")
    assert "Hello" not in prompt_of(thinker, -1)
    await page.close()


async def test_a_message_that_fails_is_no_part_of_the_chat(browser: Browser, thinker: Rig) -> None:
    page = await browser.new_page()
    await page.goto(thinker.gateway.http_url)
    await expect(page.locator("#status")).to_contain_text("ready")
    chat = page.locator("#chat")
    await page.get_by_label("Tokens", exact=True).fill("4096")
    await chat.get_by_label("Message", exact=True).fill("Lost")
    await chat.get_by_role("button", name="Send").click()
    await expect(chat.get_by_role("alert")).to_contain_text("goes on without this message")
    await page.get_by_label("Tokens", exact=True).fill("16")
    thinker.says("Yes.")
    await send(page, "Kept")
    assert "Lost" not in prompt_of(thinker, -1)
    await page.close()


async def test_tools_are_named_where_they_are_offered(page: Page) -> None:
    await expect(page.get_by_label("Tools")).to_have_value("none")
    await expect(page.locator(".offered")).to_be_hidden()
    await page.locator("#chat").get_by_role("button", name="tool call").click()
    await expect(page.get_by_label("Tools")).to_have_value("required")
    await expect(page.locator(".offered")).to_contain_text("get_weather(city, unit)")
    await page.locator("#chat").get_by_role("button", name="question").click()
    await expect(page.locator(".offered")).to_be_hidden()


async def test_the_bundled_model_shows_a_forced_call_and_who_drafted_it(page: Page) -> None:
    chat = page.locator("#chat")
    await chat.get_by_role("button", name="tool call").click()
    await chat.get_by_role("button", name="Send").click()
    await expect(chat.get_by_role("button", name="Stop")).to_have_count(0, timeout=60_000)
    await expect(page.locator(".call code")).to_have_text(
        re.compile(r'^get_(weather|time)\(\{\s*"city"\s*: "(Lima|Oslo|Tokyo)".*\}\)$', re.DOTALL)
    )
    written = await page.locator(".call pre").inner_text()
    assert written.startswith("<tool_call>")
    assert written.rstrip().endswith("</tool_call>")
    await expect(chat.locator(".tool")).to_have_text(re.compile(r"→ \{.city.:.(Lima|Oslo|Tokyo)"))
    await expect(chat.locator(".output")).to_have_count(2)
    await page.locator(".call .token.accepted").first.hover()
    await expect(page.get_by_role("tooltip")).to_have_text("accepted: guessed by ngram-1")
