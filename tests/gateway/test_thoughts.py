"""Thoughts are split off where the model marks them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from tests.gateway.gateway_rig import Rig, rig_with_template, text_by_part

pytestmark = pytest.mark.asyncio(loop_scope="session")

TEMPLATE = (
    "{% for m in messages %}<|user|>{{ m.content }}"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}<|end|>"
    "{% endfor %}{% if reasoning_effort %}effort {{ reasoning_effort }}{% endif %}"
    "{% if add_generation_prompt %}<|assistant|>"
    "{% if enable_thinking is defined %}"
    "{% if enable_thinking %}<think>\n{% else %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
    "{% endif %}"
)
CHAT = [{"role": "user", "content": "Why?"}]


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def thinker(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Rig]:
    """Yield a gateway whose model's template marks thoughts."""
    async with rig_with_template(tmp_path_factory.mktemp("thinker"), TEMPLATE) as rig:
        yield rig


async def message_of(rig: Rig, **given: Any) -> dict[str, Any]:
    response = await rig.http.post("/v1/chat/completions", json={"messages": CHAT} | given)
    assert response.status_code == 200, response.text
    message: dict[str, Any] = response.json()["choices"][0]["message"]
    return message


@pytest.mark.parametrize("chunk", [1, 4, 1000])
@pytest.mark.parametrize(
    ("said", "thinking", "thought", "content"),
    [
        ("<think>\nbecause\n</think>\n\nIt is.", None, "because", "It is."),
        ("because <b>\n</think>\n\nIt is.\n", True, "because <b>", "It is.\n"),
        ("still thinking", True, "still thinking", None),
        ("<think>\n\n</think>\n\nIt is.", None, None, "It is."),
        ("It is. <think> no", None, None, "It is. <think> no"),
        ("\n It is.", None, None, "\n It is."),
        ("It is.</think>", False, None, "It is.</think>"),
    ],
)
async def test_the_thought_is_apart_from_the_content(
    thinker: Rig,
    said: str,
    thinking: bool | None,
    thought: str | None,
    content: str | None,
    chunk: int,
) -> None:
    thinker.says(said, chunk)
    given = {} if thinking is None else {"enable_thinking": thinking}
    message = await message_of(thinker, **given)
    assert message.get("reasoning_content") == thought
    assert message["content"] == content


@pytest.mark.parametrize("chunk", [1, 4, 1000])
@pytest.mark.parametrize("thinking", [None, True])
async def test_tokens_tell_the_thought_with_its_marks(
    thinker: Rig, thinking: bool | None, chunk: int
) -> None:
    thought = "because\n</think>" if thinking else "<think>\nbecause\n</think>"
    thinker.says(f"{thought}\n\nIt is.", chunk)
    given = {} if thinking is None else {"enable_thinking": thinking}
    body = {"messages": CHAT, "speculation": {"tokens": True}} | given
    response = await thinker.http.post("/v1/chat/completions", json=body)
    texts = text_by_part(response.json()["choices"][0])
    stripped = {part: text.strip() for part, text in texts.items()}
    assert stripped == {"reasoning_content": thought, "content": "It is."}


async def test_a_stream_has_the_same_thought(thinker: Rig) -> None:
    thinker.says("<think>\nbe cause\n</think>\n\nIt is.")
    stream = await thinker.client.chat.completions.create(model="", messages=CHAT, stream=True)
    thought = content = ""
    async for piece in stream:
        delta = piece.choices[0].delta
        thought += getattr(delta, "reasoning_content", None) or ""
        content += delta.content or ""
    assert (thought, content) == ("be cause", "It is.")


async def test_efforts_and_variables_reach_the_template(thinker: Rig) -> None:
    thinker.says("x")
    thinks, does_not = {"enable_thinking": True}, {"enable_thinking": False}
    for given, shown in (
        ({"reasoning_effort": "low"}, "effort low<|assistant|>"),
        ({"chat_template_kwargs": {"reasoning_effort": "own"}}, "effort own<|assistant|>"),
        ({"reasoning_effort": "none"}, "</think>\n\n"),
        (does_not, "</think>\n\n"),
        ({"chat_template_kwargs": does_not}, "</think>\n\n"),
        ({"chat_template_kwargs": thinks}, "<think>\n"),
        ({"reasoning_effort": "none", "chat_template_kwargs": thinks}, "<think>\n"),
    ):
        await message_of(thinker, **given)
        prompt = thinker.script.requests[-1].prompt
        assert thinker.prompts.decode(prompt).endswith(shown), given
        if given.keys() == {"chat_template_kwargs"}:
            tokenized = await thinker.http.post("/tokenize", json={"messages": CHAT} | given)
            assert tokenized.json()["tokens"] == prompt


async def test_a_thought_of_the_history_reaches_the_template(thinker: Rig) -> None:
    thinker.says("x")
    for name in ("reasoning_content", "reasoning"):
        answer = {"role": "assistant", "content": "so", name: "a thought"}
        await message_of(thinker, messages=[*CHAT, answer, *CHAT])
        prompt = thinker.prompts.decode(thinker.script.requests[-1].prompt)
        assert "<think>a thought</think>" in prompt


async def test_a_caller_may_leave_the_thought_out_or_within(thinker: Rig) -> None:
    said = "<think>\nbecause\n</think>\n\nIt is."
    thinker.says(said)
    hidden = await message_of(thinker, include_reasoning=False)
    assert ("reasoning_content" in hidden, hidden["content"]) == (False, "It is.")
    whole = await message_of(thinker, separate_reasoning=False)
    assert ("reasoning_content" in whole, whole["content"]) == (False, said)
