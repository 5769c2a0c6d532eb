"""The page in a real browser: sources of tokens, comparison, charts, processes and examples."""

from __future__ import annotations

import asyncio
import json
import re

import pytest
from axe_playwright_python.async_playwright import Axe
from playwright.async_api import Browser, Page, Route, expect

from tests.web.site_rig import Site

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.slow]

# A repetition, so that an n-gram drafter has something to guess.
REPEATING = "x = [1, 2, 3]\n" * 6

GUESSED = ".output .token.accepted, .output .token.accepted_side"


async def write(page: Page, prompt: str, tokens: int = 64) -> None:
    await page.get_by_label("Endpoint").select_option(label="completion")
    await page.get_by_label("Prompt", exact=True).fill(prompt)
    await page.get_by_label("Tokens", exact=True).fill(str(tokens))


async def finished(page: Page, count: int = 1) -> None:
    """Wait until `count` outputs show their figures."""
    await expect(page.locator(".output dl:has(dd)")).to_have_count(count, timeout=60_000)


async def test_the_pointer_shows_the_source_and_drafter_of_a_token(
    page: Page,
) -> None:
    await write(page, REPEATING)
    await page.get_by_role("button", name="Run", exact=True).click()
    await finished(page)
    accepted = page.locator(".output .token.accepted")
    assert await accepted.count() > 10
    assert await page.locator(".output .token.bonus, .output .token.recovered").count() > 0
    await accepted.nth(5).hover()
    await expect(page.get_by_role("tooltip")).to_have_text("accepted: guessed by ngram-1")
    tokens = await page.locator(".output .token").count()
    steps = tokens - await page.locator(GUESSED).count()
    await expect(page.locator(".output dl")).to_contain_text(
        re.compile(rf"tokens per step({tokens / steps:.2f}|{tokens / (steps + 1):.2f})")
    )
    shown = await page.locator(".output pre").inner_text()
    asked = {
        "model": await page.locator("#model").inner_text(),
        "prompt": REPEATING,
        "max_tokens": 64,
        "temperature": 0,
    }
    answer = await page.request.post(f"{page.url}v1/completions", data=asked)
    assert shown.rstrip() == (await answer.json())["choices"][0]["text"].rstrip(), (
        "the tokens are the text, no more and no less"
    )


async def test_the_texts_of_both_ways_are_compared_side_by_side(page: Page) -> None:
    for temperature in ("0", "1"):
        await write(page, REPEATING)
        await page.get_by_label("Temperature").fill(temperature)
        await page.get_by_role("button", name="Run this prompt both ways").click()
        await expect(page.locator("#same")).to_have_text("identical text", timeout=60_000)
        left = page.locator(".output").nth(0)
        right = page.locator(".output").nth(1)
        written = await right.locator(".token").count()
        assert await right.locator(".token.plain").count() == written > 0
        assert await left.locator(".token").count() == written
        await expect(page.locator("#compared")).to_have_text(
            re.compile(rf"({written}|{written - 1}) of \1 tokens compared")
        )
        await expect(page.locator("#factor")).to_have_text(re.compile(r"\d+\.\d\s×"))
        boxes = [await output.bounding_box() for output in (left, right)]
        assert boxes[0] is not None
        assert boxes[1] is not None
        assert boxes[0]["y"] == boxes[1]["y"]
        assert boxes[0]["x"] < boxes[1]["x"]


async def test_a_text_that_differs_is_said_to_differ_and_where(page: Page) -> None:
    """A proxy changes the plain text's third token."""

    async def change(route: Route) -> None:
        asked = route.request.post_data_json
        # Before each of the two texts, the page asks for one token that it does not show.
        if asked["speculation"].get("enabled", True) or asked["max_tokens"] == 1:
            await route.continue_()
            return
        answer = await route.fetch()
        events = (await answer.text()).split("\n\n")
        data = json.loads(events[2].removeprefix("data: "))
        data["choices"][0]["speculation"]["tokens"][0]["text"] += "!"
        events[2] = f"data: {json.dumps(data)}"
        await route.fulfill(response=answer, body="\n\n".join(events))

    await page.route("**/v1/completions", change)
    await write(page, REPEATING, 16)
    await page.get_by_role("button", name="Run this prompt both ways").click()
    await expect(page.locator("#same")).to_have_text("the texts differ", timeout=60_000)
    await expect(page.locator("#compared")).to_have_text("at token 3 of 16")


async def test_the_timeline_has_a_lane_of_each_process_and_a_row_of_each_text(page: Page) -> None:
    await page.get_by_label("Tokens", exact=True).fill("32")
    await page.get_by_role("button", name="Four texts at once").click()
    await finished(page, 4)
    lanes = page.locator("#timeline .lane:has(svg)")
    await expect(lanes.locator("strong")).to_have_text(["verifier", "ngram-1"])
    forwards = await lanes.nth(0).locator("li").all_inner_texts()
    drafts = await lanes.nth(1).locator("li").all_inner_texts()
    for i in range(4):
        output = page.locator("#outputs .output").nth(i)
        guesses = await output.locator(".accepted, .accepted_side").count()
        assert (f", {guesses} accepted" in drafts[i]) or (guesses == 0 and drafts[i] == "waits")
        # Each forward ends with a token of the target, except a forward that the text's end cuts
        # short.
        own = await output.locator(".token").count() - guesses
        title = await output.locator("h3 span").inner_text()
        assert forwards[i] in (f"{title}: {own} forwards", f"{title}: {own + 1} forwards")
    shown = [int(text.rpartition(": ")[2].split()[0]) for text in forwards]
    assert await lanes.nth(0).locator(".block").count() == sum(shown)
    assert await lanes.nth(0).locator(".wait").count() == 4
    assert await lanes.nth(1).locator(".block").count() > 0
    await expect(page.locator("#same")).to_contain_text("tokens a second")


async def test_the_charts_show_a_run(page: Page) -> None:
    await expect(page.locator("#no-activity")).to_be_visible()
    await expect(page.locator(".charts")).to_be_hidden()
    await write(page, REPEATING, 128)
    await page.get_by_role("button", name="Run", exact=True).click()
    # Each value covers the last seconds, so it disappears soon after the run.
    await page.wait_for_function(
        """() => Object.entries({
            acceptance: /^\\d+ %$/,
            lengths: /^mean \\d+\\.\\d\\d$/,
            rate: /^[1-9]\\d*$/,
            tpot: /^\\d+\\.\\d$/,
        }).every(([name, pattern]) => {
            const shown = document.getElementById('now-' + name).textContent;
            return pattern.test(shown);
        })"""
    )
    await finished(page)
    drawn = await page.evaluate(
        """() => [...document.querySelectorAll('.charts canvas')].map((canvas) => {
            const context = canvas.getContext('2d');
            const pixels = context.getImageData(0, 0, canvas.width, canvas.height).data;
            return new Set(new Uint32Array(pixels.buffer)).size; })"""
    )
    assert len(drawn) == 4
    assert all(colors > 3 for colors in drawn), "axes, and something drawn in a colour of its own"
    shapes = re.compile(r"\d\.\d\d tokens per step from (chain|tree)s .* were accepted\.$")
    await expect(page.locator("#shapes")).to_have_text(shapes)


async def test_an_error_is_shown_until_the_next_run(page: Page) -> None:
    await write(page, REPEATING, 4096)
    await page.get_by_role("button", name="Run", exact=True).click()
    await expect(page.get_by_role("alert")).to_contain_text("max_tokens asks for 4096 tokens")
    await write(page, REPEATING, 8)
    await page.get_by_role("button", name="Run", exact=True).click()
    await finished(page)
    await expect(page.get_by_role("alert")).to_be_hidden()


async def test_stop_stops(page: Page) -> None:
    await write(page, "def f():\n", 2000)
    await page.locator("#drafter").select_option(label="none: plain decoding")
    # Click from within the page. On a busy machine a click from outside might come too late.
    await page.evaluate(
        """() => new MutationObserver((_, observer) => {
            if (document.querySelectorAll('.output .token').length < 4) return;
            observer.disconnect();
            document.getElementById('stop').click();
        }).observe(document.body, { childList: true, subtree: true })"""
    )
    await page.get_by_role("button", name="Run", exact=True).click()
    await page.locator(".output .token").nth(3).wait_for()
    await expect(page.get_by_role("button", name="Stop")).to_be_disabled()
    await expect(page.get_by_role("alert")).to_be_hidden()
    await expect(page.locator(".process", has_text="verifier")).to_contain_text(
        "sequences of this gateway 0"
    )
    assert await page.locator(".output .token").count() < 2000


async def test_the_page_works_with_the_keyboard_alone(page: Page) -> None:
    await page.keyboard.press("Tab")
    await page.keyboard.press("Enter")  # the link that skips to the run
    await expect(page.get_by_role("button", name="Run it both ways")).to_be_focused()
    await page.keyboard.press("Enter")
    await finished(page, 2)
    await page.locator(".answer").first.focus()
    await page.keyboard.press("ArrowRight")
    await expect(page.get_by_role("tooltip")).to_have_text(
        re.compile("plain|accepted|bonus|recovered")
    )
    await page.keyboard.press("Escape")
    await expect(page.get_by_role("tooltip")).to_be_hidden()


@pytest.mark.parametrize(("scheme", "width"), [("light", 360), ("dark", 1280)])
async def test_the_page_is_accessible_in_each_theme_and_width(
    browser: Browser, site: Site, scheme: str, width: int
) -> None:
    context = await browser.new_context(
        viewport={"width": width, "height": 800},
        color_scheme=scheme,
    )
    page = await context.new_page()
    await page.goto(site.url)
    await page.locator("#map").get_by_text("ngram-1", exact=True).wait_for()
    await write(page, REPEATING, 32)
    await page.get_by_role("button", name="Run", exact=True).click()
    await finished(page)
    assert await page.evaluate("document.documentElement.scrollWidth <= innerWidth"), (
        "nothing is wider than the screen"
    )
    found = await Axe().run(page)
    assert found.violations_count == 0, found.generate_report()
    ground = await page.evaluate("getComputedStyle(document.body).backgroundColor")
    brightness = sum(int(part) for part in re.findall(r"\d+", ground)[:3]) / 3
    assert (brightness > 128) is (scheme == "light")
    await page.get_by_role("button", name="Switch between light and dark").click()
    assert await page.evaluate("getComputedStyle(document.body).backgroundColor") != ground
    await context.close()


async def test_the_join_example_continues_with_the_new_drafter(page: Page, site: Site) -> None:
    example = page.locator("#example-join")
    await expect(example.locator("code").first).to_contain_text(
        f"--verifier {site.stack.address} --family ngram --id ngram-new"
    )
    await example.get_by_role("button", name="Start the text").click()
    await page.locator(".output .token").nth(20).wait_for()
    assert await page.locator(GUESSED).count() == 0, "only the new drafter guesses"
    site.stack.add_drafter("ngram-late", "ngram")
    try:
        await expect(page.locator(".process", has_text="ngram-late")).to_contain_text(
            "connected", timeout=30_000
        )
        await expect(page.locator("#happened")).to_contain_text("ngram-late joined.")
        await expect(example.locator(".outcome")).to_contain_text(
            "Plain decoding gives the same text.", timeout=60_000
        )
        outcome = re.fullmatch(
            r"ngram-late joined after \d+ tokens. (\d+) % of the next 400 tokens are its guesses: "
            r"\d+ steps of the model instead of 400. Plain decoding gives the same text.",
            await example.locator(".outcome").inner_text(),
        )
        assert outcome is not None
        assert int(outcome[1]) > 20
    finally:
        site.remove_drafter("ngram-late")
    await expect(page.locator("#happened")).to_contain_text("ngram-late left.")


async def test_the_leave_examples_command_kills_only_its_drafter(page: Page, site: Site) -> None:
    # An id with a shell command in it, and an id that begins like the victim's id.
    others = ("x'; touch pwned; echo '", "ngram-12")
    for name in others:
        site.stack.add_drafter(name, "ngram")
        await expect(page.locator(".process", has_text=name)).to_contain_text(
            "connected", timeout=30_000
        )
    example = page.locator("#example-leave")
    line = await example.locator("code").first.inner_text()
    assert "--id ngram-1(" in line
    await example.get_by_role("button", name="Start the text").click()
    await page.locator(".output .token").nth(20).wait_for()
    shell = await asyncio.create_subprocess_exec("sh", "-c", line)
    assert await shell.wait() == 0
    try:
        await expect(page.locator(".process", has_text="lost")).to_contain_text(
            "ngram-1", timeout=10_000
        )
        assert [
            name
            for name, process in site.stack.drafters.items()
            if process.popen.poll() is not None
        ] == ["ngram-1"]
        await expect(page.locator("#status")).to_have_text("degraded")
        await expect(page.locator("#status")).to_have_class("status fair")
        await expect(page.locator("#reason")).to_have_text("drafter ngram-1 is lost")
        await expect(example.locator("code").first).to_contain_text("--id ngram-12(")
        await expect(example.locator(".outcome")).to_contain_text(
            "ngram-1 was lost after", timeout=60_000
        )
        await expect(page.locator("#example-timeline .gone strong")).to_have_text("ngram-1")
        written = await page.locator("#example-output .token").count()
        await page.wait_for_function(
            "count => document.querySelectorAll('#example-output .token').length != count",
            arg=written,
        )
        site.stack.drafters["ngram-1"].start()
        await expect(example.locator(".outcome")).to_contain_text(
            re.compile(r"It was back after \d+\.\d s\. Plain decoding gives the same text\."),
            timeout=90_000,
        )
        await expect(page.locator("#example-timeline .gone")).to_have_count(0)
        assert await page.locator("#example-timeline .lost").count() == 1
    finally:
        for name in others:
            site.remove_drafter(name)
        if site.stack.drafters["ngram-1"].popen.poll() is not None:
            site.stack.drafters["ngram-1"].start()
    await expect(page.locator("#status")).to_have_text("ready", timeout=30_000)


async def test_the_page_reconnects_to_a_restarted_gateway(page: Page, site: Site) -> None:
    site.gateway.kill()
    await expect(page.locator("#reason")).to_have_text(
        "the gateway does not answer", timeout=10_000
    )
    await expect(page.locator("#status")).to_have_class("status bad")
    site.gateway.start()
    ngram = page.locator(".process", has=page.get_by_text("ngram-1", exact=True))
    await expect(ngram).to_contain_text("connected", timeout=60_000)
