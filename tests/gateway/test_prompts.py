"""The gateway renders and tokenises prompts exactly as `transformers` does, but without it."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from gateway.text import templates
from gateway.text.prompts import Prompts
from outrider.errors import OutriderError, Reason
from tests.gateway.gateway_rig import TARGET, model_with_template

CHAT = [
    {"role": "system", "content": "Be <short> & 'kind'.\n"},
    {"role": "user", "content": "Hi 😀"},
    {"role": "assistant", "content": "Hello!"},
    {"role": "user", "content": "Who?"},
]
# The features that templates of the hub use: trimmed blocks, namespaces, loop controls, tojson,
# special tokens and the generation tag.
TEMPLATE = """\
{%- set seen = namespace(system=false) -%}
{{ bos_token }}
{% for message in messages %}
    {%- if message.role == 'system' %}
        {%- set seen.system = true %}
[SYS] {{ message | tojson }}
        {% continue %}
    {%- endif %}
    {% if message.role == 'assistant' %}
{% generation %}{{ message['content'] | trim }}{{ eos_token }}{% endgeneration %}{% else %}
{{ message.role | upper }}: {{ message.content }}
    {% endif %}
{% endfor %}
{% if seen.system and add_generation_prompt and not tools -%}
ASSISTANT {{ unknown_token }}{{ strftime_now('%%') }}{% endif %}
"""


TRIMMING = (
    "{% for m in messages %}[{{ m.role }}] {{ m.content | trim }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)


@pytest.mark.parametrize("template", [None, TRIMMING], ids=["bundled", "trimming"])
@pytest.mark.parametrize("begun", ["Sure", "two\n\nlines \n"])
def test_an_open_message_renders_as_in_transformers(
    tmp_path: Path, prompts: Prompts, template: str | None, begun: str
) -> None:
    model = TARGET if template is None else model_with_template(tmp_path, template)
    chat = [*CHAT, {"role": "assistant", "content": begun}]
    expected = AutoTokenizer.from_pretrained(model).apply_chat_template(
        chat, tokenize=False, continue_final_message=True
    )
    rendered = Prompts(model).render_blocking(
        chat, add_generation_prompt=False, continue_final_message=True
    )
    assert rendered == expected
    assert rendered.endswith(begun if template is None else begun.strip())


def test_continuing_a_message_that_the_template_hides_is_refused(
    tmp_path: Path,
) -> None:
    prompts = Prompts(model_with_template(tmp_path, "{{ messages[0].content }}"))
    with pytest.raises(OutriderError, match="does not show the last message") as caught:
        prompts.render_blocking(CHAT, add_generation_prompt=False, continue_final_message=True)
    assert caught.value.field == "continue_final_message"


async def test_a_rendered_chat_has_the_ids_of_transformers(prompts: Prompts) -> None:
    tokenizer: Any = AutoTokenizer.from_pretrained(TARGET)
    expected = tokenizer.apply_chat_template(CHAT, add_generation_prompt=True)["input_ids"]
    assert (
        await prompts.encode(
            prompts.render_blocking(CHAT), "messages", 2048, add_special_tokens=False
        )
        == expected
    )


def test_a_demanding_template_renders_as_in_transformers(tmp_path: Path) -> None:
    model = model_with_template(
        tmp_path, TEMPLATE, bos_token={"content": "<|user|>", "__type": "AddedToken"}
    )
    expected = AutoTokenizer.from_pretrained(model).apply_chat_template(
        CHAT, tokenize=False, add_generation_prompt=True
    )
    assert Prompts(model).render_blocking(CHAT) == expected


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].content.nothing.more }}", "nothing"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ 1 // 0 }}", "zero"),
    ],
)
def test_a_templates_refusal_is_an_error_with_its_message(
    tmp_path: Path, template: str, words: str
) -> None:
    with pytest.raises(OutriderError, match=words) as caught:
        Prompts(model_with_template(tmp_path, template)).render_blocking(
            [{"role": "user", "content": "hi"}]
        )
    assert (caught.value.reason, caught.value.field) == (Reason.INVALID_VALUE, "messages")


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ raise_exception('no') }}", Reason.INVALID_VALUE),
        (None, Reason.UNSUPPORTED_PARAMETER),
    ],
)
async def test_a_refused_chat_names_the_callers_field(
    tmp_path: Path, template: str | None, reason: Reason
) -> None:
    prompts = Prompts(model_with_template(tmp_path, template))
    with pytest.raises(OutriderError) as caught:
        await prompts.render(said("hi"), "chat.messages", 2048, "a")
    assert (caught.value.reason, caught.value.field) == (reason, "chat.messages")
    assert caught.value.message.startswith("chat.messages")


def test_a_template_that_does_not_parse_is_an_error_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(OutriderError, match="does not parse: Unexpected end of template"):
        Prompts(model_with_template(tmp_path, "{% if x %}"))


async def test_a_long_prompt_is_tokenised_whole(tmp_path: Path, prompts: Prompts) -> None:
    model = model_with_template(tmp_path, None)
    tokenizer = json.loads((tmp_path / "tokenizer.json").read_text())
    tokenizer["truncation"] = {
        "direction": "Right",
        "max_length": 8,
        "strategy": "LongestFirst",
        "stride": 0,
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    text = "x = 1\n" * 10_000
    ids = await Prompts(model).encode(text, "prompt", 2**17)
    assert prompts.decode(ids) == text


# The output of this template depends on the last message.
HOSTILE = (
    "{% set last = messages[-1].content %}"
    "{% if last == 'loop' %}{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}"
    "{% endfor %}{% elif last == 'pad' %}{{ '%*d' % (last | length * 10 ** 9, 1) }}"
    "{% endif %}{{ last }}"
)


def said(text: str) -> list[dict[str, str]]:
    """Return a conversation of one message."""
    return [{"role": "user", "content": text}]


@pytest.mark.parametrize("attackers", ["a", "ac"])
@pytest.mark.parametrize(("text", "limit"), [("loop", "longer than 0.5 s"), ("pad", "256 MiB")])
async def test_a_template_that_hangs_ends_at_its_limit_and_delays_no_other(
    tmp_path: Path, text: str, limit: str, attackers: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(templates, "_SECONDS", 0.5)
    model = model_with_template(tmp_path, HOSTILE)
    prompts = Prompts(model)
    hanging = [
        asyncio.create_task(prompts.render(said(text), "messages", 2048, name))
        for name in attackers
        for _ in range(2)
    ]
    await asyncio.sleep(0.1)  # by now all requests that may run at once run
    assert await prompts.render(said("hello"), "messages", 2048, "b") == "hello"
    if text == "loop":
        assert not any(task.done() for task in hanging)
    for task in hanging:
        with pytest.raises(OutriderError, match=limit) as caught:
            await task
        assert (caught.value.reason, caught.value.field) == (Reason.INVALID_VALUE, "messages")
        assert f"the chat template of {model}" in caught.value.message
    assert await prompts.render(said("hello"), "messages", 2048, "a") == "hello"


def test_a_template_that_hangs_while_it_is_compiled_is_an_error_at_the_start(
    tmp_path: Path,
) -> None:
    """jinja2 computes constants when it compiles a template."""
    model = model_with_template(tmp_path, "{{ 'a' * 10 ** 10 }}")
    with pytest.raises(OutriderError, match="256 MiB") as caught:
        Prompts(model).render_blocking(said("hello"))
    assert caught.value.reason is Reason.INVALID_VALUE
