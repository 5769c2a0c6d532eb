"""Named templates are chosen as in `transformers`; calls have the form that a template shows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from gateway.http.openai.conversation import Message
from gateway.text.prompts import Prompts
from outrider.errors import OutriderError, Reason
from tests.gateway.gateway_rig import TARGET, model_with_template, rig_with_template

ARGUMENTS = '{"city":  "Ulm", "days": [1, null], "é": "ü"}'
CALL: dict[str, Any] = {"id": "c00000001", "function": {"name": "look_up", "arguments": ARGUMENTS}}
TALK: list[dict[str, Any]] = [
    {"role": "user", "content": "?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL, CALL]},
    {"role": "tool", "tool_call_id": "c00000001", "content": "7"},
]
TOOL = {"type": "function", "function": {"name": "look_up", "parameters": {"type": "object"}}}


def template(call: str, beside: str = "true", rest: str = "") -> str:
    """Return a template that writes calls in the form `call` where `beside` is true."""
    return (
        "{% for m in messages %}{{ m.role }}: {% if m.tool_calls and " + beside + " %}"
        "{% for t in m.tool_calls %}" + call + "|{% endfor %}"
        "{% else %}{{ m.content + '' }}{% endif %}" + rest + ";{% endfor %}"
    )


_TEXT = "{{ t.function.name + t.function.arguments }}"
_REFUSES_RESULTS = "{% if m.role == 'tool' %}{{ raise_exception('no results') }}{% endif %}"
_NEEDS_RESULT = (
    "{% if messages[-1].role == 'assistant' %}{{ raise_exception('a result must follow') }}"
    "{% endif %}"
)
_NEEDS_IDS = "{% if t.id | length != 9 %}{{ raise_exception('nine characters') }}{% endif %}"
OBJECT = json.dumps(json.loads(ARGUMENTS), ensure_ascii=False)
FORMS = {
    "object": (template("{{ t.function.arguments | tojson }}"), OBJECT),
    "whole call": (template("{{ t.function | tojson }}"), OBJECT),
    "items": (
        template("{% for k, v in t.function.arguments | items %}<{{ k }}={{ v }}>{% endfor %}"),
        "<city=Ulm><days=[1, None]><é=ü>",
    ),
    "text added": (template(_TEXT), ARGUMENTS),
    "text joined": (template("{{ ['', t.function.arguments] | join(' ') }}"), ARGUMENTS),
    "text printed": (template("{{ t.function.arguments }}"), ARGUMENTS),
    "either": (
        template(
            "{% if t.function.arguments is string %}{{ t.function.arguments }}"
            "{% else %}{{ t.function.arguments | tojson }}{% endif %}"
        ),
        OBJECT,
    ),
    "text beside null": (template(_TEXT, "m.content is none"), ARGUMENTS),
    "object beside null": (
        template("{{ t.function.arguments | tojson }}", "m.content is none"),
        OBJECT,
    ),
    "text, ids of nine letters": (template(_NEEDS_IDS + _TEXT), ARGUMENTS),
    "text, a result follows": (template(_TEXT, rest=_NEEDS_RESULT), ARGUMENTS),
}


@pytest.mark.parametrize("what", FORMS)
def test_calls_have_the_form_that_the_template_shows(what: str, tmp_path: Path) -> None:
    source, shown = FORMS[what]
    prompts = Prompts(model_with_template(tmp_path, source))
    messages = [Message.model_validate(message).for_template() for message in TALK]
    rendered = prompts.render_blocking(messages, tools=[TOOL])
    assert rendered.count(shown) == 2
    assert rendered.endswith("tool: 7;")


def test_a_template_that_refuses_results_still_gets_its_form(tmp_path: Path) -> None:
    prompts = Prompts(model_with_template(tmp_path, template(_TEXT, rest=_REFUSES_RESULTS)))
    messages = [Message.model_validate(message).for_template() for message in TALK]
    assert prompts.render_blocking(messages[:2]).count(ARGUMENTS) == 2
    with pytest.raises(OutriderError, match="no results"):
        prompts.render_blocking(messages)


def test_a_template_that_hangs_with_calls_is_no_reason_not_to_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.text.templates._SECONDS", 0.5)
    loop = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    prompts = Prompts(model_with_template(tmp_path, template(loop)))
    assert prompts.render_blocking(TALK[:1]) == "user: ?;"


async def test_every_api_gives_a_templates_calls_their_form(tmp_path: Path) -> None:
    source = template(_TEXT) + "{% if false %}<tool_call>{% endif %}"
    used = {"type": "tool_use", "id": "t1", "name": "look_up", "input": json.loads(ARGUMENTS)}
    result = {"type": "tool_result", "tool_use_id": "t1", "content": "7"}
    called = {"type": "function_call", "call_id": "c", **CALL["function"]}
    bodies: dict[str, dict[str, Any]] = {
        "/v1/chat/completions": {"messages": TALK, "max_tokens": 16},
        "/v1/responses": {
            "input": [
                {"role": "user", "content": "?"},
                called,
                {"type": "function_call_output", "call_id": "c", "output": "7"},
            ],
            "max_output_tokens": 16,
        },
        "/v1/messages": {
            "messages": [
                {"role": "user", "content": "?"},
                {"role": "assistant", "content": [used]},
                {"role": "user", "content": [result]},
            ],
            "max_tokens": 16,
        },
    }
    async with rig_with_template(tmp_path, source) as rig:
        rig.says("ok")
        for path, body in bodies.items():
            answer = await rig.http.post(path, json={"model": "models/target", **body})
            assert answer.status_code == 200, answer.text
            prompt = rig.prompts.decode(rig.script.requests[-1].prompt)
            text = OBJECT if path == "/v1/messages" else ARGUMENTS
            assert f"look_up{text}|" in prompt, path


PLAIN = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
WITH_TOOLS = "{% for t in tools %}<tool_call>{{ t.function.name }}\n{% endfor %}" + PLAIN


@pytest.mark.parametrize("place", ["list", "files", "file beside the configuration", "one file"])
def test_of_named_templates_the_one_for_tools_is_taken_as_in_transformers(
    place: str, tmp_path: Path
) -> None:
    named = [
        {"name": "rag", "template": "{{ 0 }}"},
        {"name": "tool_use", "template": WITH_TOOLS},
        {"name": "default", "template": PLAIN},
    ]
    model = model_with_template(tmp_path, named if place in ("list", "one file") else PLAIN)
    if place in ("files", "one file"):
        (tmp_path / "chat_template.jinja").write_text(PLAIN)
    if place in ("files", "file beside the configuration"):
        (tmp_path / "additional_chat_templates").mkdir()
        (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text(WITH_TOOLS)
    prompts, own = Prompts(model), AutoTokenizer.from_pretrained(model)
    for tools in ([TOOL], None):
        if place == "file beside the configuration" and tools is None:
            # `transformers` refuses a chat without tools here: it forgets the configuration's
            # template.
            assert prompts.render_blocking(TALK[:1]) == "user: ?\n"
            continue
        expected = own.apply_chat_template(TALK[:1], tools=tools, tokenize=False)
        assert prompts.render_blocking(TALK[:1], tools=tools) == expected
    calls = prompts.answers.calls
    assert (calls is None) == (place == "one file")


def test_a_model_with_a_template_for_tools_alone_refuses_chats_without(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": WITH_TOOLS}]
    prompts = Prompts(model_with_template(tmp_path, named))
    assert prompts.render_blocking(TALK[:1], tools=[TOOL]).startswith("<tool_call>look_up")
    with pytest.raises(OutriderError, match="needs the chat template default") as caught:
        prompts.render_blocking(TALK[:1])
    assert caught.value.field == "messages"


@pytest.mark.parametrize("given", [7, [7], [{"name": "default"}], [{"name": 1, "template": "x"}]])
def test_a_chat_template_of_another_type_is_an_error_at_the_start(
    given: object, tmp_path: Path
) -> None:
    with pytest.raises(OutriderError, match="its chat_template must be a text") as caught:
        Prompts(model_with_template(tmp_path, given))
    assert (caught.value.reason, caught.value.field) == (Reason.INVALID_VALUE, "tokenizer")


@pytest.mark.parametrize(
    "name", ["chat_template.jinja", "additional_chat_templates/tool_use.jinja"]
)
def test_a_template_that_is_not_utf8_is_an_error_at_the_start(name: str, tmp_path: Path) -> None:
    model = model_with_template(tmp_path, PLAIN)
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_bytes(b"\xff")
    with pytest.raises(OutriderError, match=f"its {name} is not UTF-8") as caught:
        Prompts(model)
    assert (caught.value.reason, caught.value.field) == (Reason.INVALID_VALUE, "tokenizer")


def test_the_bundled_template_gets_objects(prompts: Prompts) -> None:
    """The model was trained with arguments as objects. `transformers` renders the same text."""
    messages = [Message.model_validate(message).for_template() for message in TALK]
    calls = [{**CALL, "function": {"name": "look_up", "arguments": json.loads(ARGUMENTS)}}] * 2
    given = [TALK[0], {**TALK[1], "content": "", "tool_calls": calls}, TALK[2]]
    expected = AutoTokenizer.from_pretrained(TARGET).apply_chat_template(given, tokenize=False)
    assert prompts.render_blocking(messages, add_generation_prompt=False) == expected
