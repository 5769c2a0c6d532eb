"""Each format's grammar and reader agree."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gateway.tools.definitions import Tool, ToolUse
from gateway.tools.formats import FORMATS, JSON_FORMAT, ToolFormat, answer_format
from gateway.tools.grammar import calls_grammar
from gateway.tools.reader import (
    AnswerReader,
    CallArguments,
    CallBegin,
    Content,
    Part,
    Reading,
    Reasoning,
)
from outrider.errors import OutriderError
from outrider.grammar.backends import Compiled, Libraries, Matcher
from outrider.grammar.kinds import Grammar, GrammarKind
from outrider.grammar.trial import Trial, compile_only
from tests.gateway.gateway_rig import TARGET

SCHEMA = {
    "type": "object",
    "properties": {
        "a": {"type": "string"},
        "n": {"type": "integer", "minimum": 0, "maximum": 99},
        "o": {
            "type": "object",
            "properties": {"x": {"type": "boolean"}},
            "required": ["x"],
            "additionalProperties": False,
        },
        "l": {"type": "array", "items": {"type": "integer", "maximum": 9}, "maxItems": 2},
    },
    "required": ["a", "n", "o", "l"],
    "additionalProperties": False,
}
TOOLS = dict.fromkeys(("f", "f_2"), SCHEMA)
ALL = [*FORMATS.values(), JSON_FORMAT]
BY_NAME = pytest.mark.parametrize("form", ALL, ids=lambda form: form.name)
EOS = 0
TYPES = {"a": str, "n": int, "o": dict, "l": list}


@pytest.fixture(scope="module")
def libraries() -> Libraries:
    return Libraries(TARGET, 4096, (EOS,))


def use_of(form: ToolFormat, *, forced: bool = True) -> ToolUse:
    return ToolUse([Tool(name, SCHEMA, strict=True) for name in TOOLS], forced)


def compiled_for(libraries: Libraries, form: ToolFormat, *, forced: bool = True) -> Compiled:
    grammar = calls_grammar(form, use_of(form, forced=forced), form.thought, "possible")
    trial = Trial(libraries, 4096, (EOS,))
    return compile_only(libraries, trial.translated(grammar))


def walk(libraries: Libraries, matcher: Matcher, seed: int, most: int = 160) -> tuple[str, bool]:
    """Return a random text of the grammar, and whether it is complete.

    Where many tokens are allowed, tokens that close brackets and the like are likelier, so that
    texts end.
    """
    choose = random.Random(seed)
    mask = np.zeros((1, 4096 // 32), np.int32)
    text = b""
    for _ in range(most):
        matcher.fill(mask, 0)
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
        if EOS in allowed and (len(allowed) == 1 or choose.random() < 0.5):
            return text.decode(errors="ignore"), True
        others = [int(token) for token in allowed if token != EOS]
        if len(others) > 40:
            ends = [token for token in others if libraries.token_bytes[token] in (b'"', b"<", b"}")]
            others = choose.sample(others, 5) + ends
        token = choose.choice(others)
        assert matcher.accept(token)
        text += libraries.token_bytes[token]
    return text.decode(errors="ignore"), False


def parts_of(form: ToolFormat, text: str, *, forced: bool = True, step: int = 3) -> list[Part]:
    reader = AnswerReader(Reading(form, TOOLS, form.thought, is_forced=forced))
    parts = [part for at in range(0, len(text), step) for part in reader.push(text[at : at + step])]
    return [*parts, *reader.finish()]


def calls_of(parts: list[Part]) -> list[tuple[str, str]]:
    """Return the name and arguments of each call."""
    names = [part.name for part in parts if isinstance(part, CallBegin)]
    pieces = [""] * len(names)
    for part in parts:
        if isinstance(part, CallArguments):
            pieces[part.index] += part.text
    return list(zip(names, pieces, strict=True))


def check_walk(libraries: Libraries, form: ToolFormat, compiled: Compiled, seed: int) -> bool:
    """Read a random text of forced calls back; return whether the text was complete."""
    text, complete = walk(libraries, compiled.matcher(), seed)
    parts = parts_of(form, text)
    assert not any(isinstance(part, Content) for part in parts), text
    calls = calls_of(parts)
    for index, (name, arguments) in enumerate(calls):
        assert name in TOOLS, text
        if complete or index < len(calls) - 1:
            value = json.loads(arguments)
            assert isinstance(value, dict), text
            assert {key: type(found) for key, found in value.items()} == TYPES, text
    assert calls or not complete, text
    # Wherever the text is cut, each call that is read is the beginning of a call of the whole text.
    for end in range(len(text)):
        for (name, begun), (full_name, full) in zip(
            calls_of(parts_of(form, text[:end], step=1000)), calls, strict=False
        ):
            assert name == full_name
            assert full.startswith(begun)
    return complete


@BY_NAME
@pytest.mark.parametrize("seeds", [range(3), pytest.param(range(3, 25), marks=pytest.mark.slow)])
def test_random_texts_of_the_grammar_are_read_back(
    libraries: Libraries, form: ToolFormat, seeds: range
) -> None:
    compiled = compiled_for(libraries, form)
    for seed in seeds:
        check_walk(libraries, form, compiled, seed)


NASTY = [
    "plain",
    "",
    "two\nlines\n",
    "  indented code\n",
    'quotes " and \\ and {[',
    "</tool_call> <tool_call> ```",
    "42",
    "true",
    "null",
    '{"json": 1}',
    "日本 😀 e\u0301",
]


def written(form: ToolFormat, value: str) -> Iterator[str]:
    """Yield arguments as models write them.

    The arguments are {"a": value, "n": 7, "o": {"x": true}, "l": [1, 2]}.
    """
    others = {"n": "7", "o": '{"x": true}', "l": "[1, 2]"}
    match form.style:
        case "json":
            yield json.dumps(
                {"a": value, "n": 7, "o": {"x": True}, "l": [1, 2]}, ensure_ascii=False
            )
        case "gemma":
            yield f'{{a:<|"|>{value}<|"|>,n:7,o:{{x:true}},l:[1,2]}}'
        case "qwen_xml":
            yield "\n".join(
                f"<parameter={key}>\n{text}\n</parameter>"
                for key, text in ({"a": value} | others).items()
            )
        case "minimax_xml":
            yield "\n".join(
                f'<parameter name="{key}">{text}</parameter>'
                for key, text in ({"a": value} | others).items()
            )
        case "glm_xml":
            yield "\n".join(
                f"<arg_key>{key}</arg_key>\n<arg_value>{text}</arg_value>"
                for key, text in ({"a": value} | others).items()
            )
        case style:
            tag = "｜DSML｜ parameter" if "4_1" in style else "｜DSML｜parameter"
            yield "\n".join(
                f'<{tag} name="{key}" string="{str(key == "a").lower()}">{text}</{tag}>'
                for key, text in ({"a": value} | others).items()
            )


def call_text(form: ToolFormat, name: str, arguments: str) -> str:
    marks = form.calls[0]
    begin = marks.begin.replace("{name}", name).replace("{number}", "0")
    return f"{begin}{arguments}{marks.end}"


def answer_text(form: ToolFormat, calls: list[str]) -> str:
    begin, end = form.sections[0] if form.sections else ("", "")
    return begin + form.separator.join(calls) + end


@BY_NAME
@pytest.mark.parametrize("value", NASTY)
def test_a_text_comes_back_as_the_model_wrote_it(form: ToolFormat, value: str) -> None:
    for arguments in written(form, value):
        text = answer_text(form, [call_text(form, name, arguments) for name in TOOLS])
        for step in (1, 3, 1000):
            calls = calls_of(parts_of(form, text, step=step))
            expected = {"a": value, "n": 7, "o": {"x": True}, "l": [1, 2]}
            assert [(name, json.loads(found)) for name, found in calls] == [
                (name, expected) for name in TOOLS
            ]


@BY_NAME
def test_the_grammar_takes_a_call_as_the_model_writes_it(
    libraries: Libraries, form: ToolFormat
) -> None:
    [arguments] = written(form, "plain")
    text = answer_text(form, [call_text(form, name, arguments) for name in TOOLS])
    for forced in (True, False):
        matcher = compiled_for(libraries, form, forced=forced).matcher()
        assert matcher.accept_bytes(text.encode())
        mask = np.zeros((1, 4096 // 32), np.int32)
        matcher.fill(mask, 0)
        assert mask[0, 0] & 1 << EOS


@BY_NAME
def test_free_text_may_come_before_a_call_that_the_model_chooses(
    libraries: Libraries, form: ToolFormat
) -> None:
    [arguments] = written(form, "plain")
    text = "Let me see. " + answer_text(form, [call_text(form, "f", arguments)])
    matcher = compiled_for(libraries, form, forced=False).matcher()
    assert matcher.accept_bytes(text.encode())
    parts = parts_of(form, text, forced=False)
    assert "".join(part.text for part in parts if isinstance(part, Content)) == "Let me see."
    assert [name for name, _ in calls_of(parts)] == ["f"]


@BY_NAME
def test_each_character_is_placed_in_its_part_of_the_answer(form: ToolFormat) -> None:
    [arguments] = written(form, "<plain {")
    calls = [call_text(form, name, arguments) for name in TOOLS]
    begin, end = form.sections[0] if form.sections else ("", "")
    thought = "" if form.thought is None else f"{form.thought.begin}so{form.thought.end}"
    reader = AnswerReader(Reading(form, TOOLS, form.thought))
    texts: dict[str | None, str] = {}
    place = None
    waiting = ""
    for character in f"{thought}\n\nLet me see.\n{answer_text(form, calls)}":
        waiting += character
        found = reader.place(character)
        if found is not None:
            place = found
            texts[place] = texts.get(place, "") + waiting
            waiting = ""
    texts[place] += waiting
    expected = {
        "reasoning_content": thought,
        "content": "Let me see.",
        "tool_calls[0]": begin + calls[0],
        "tool_calls[1]": calls[1] + end,
    }
    # The text between two calls comes with the second call.
    texts["tool_calls[1]"] = texts["tool_calls[1]"].removeprefix(form.separator)
    assert {key: text.strip() for key, text in texts.items()} == {
        key: text.strip() for key, text in expected.items() if text
    }


@pytest.mark.parametrize(
    ("template", "name", "thought"),
    [
        ("{{ '<tool_call>\\n{\"name\": ' }}<|im_start|></think>", "qwen_3", "<think>"),
        ("<tool_call>\n<function=x>\n<parameter=", "qwen_3_coder", None),
        ("<tool_call>...", "hermes", None),
        ("[TOOL_CALLS] [ ... ]", "mistral_list", None),
        ("[TOOL_CALLS]f[ARGS]{} [/THINK]", "mistral", "[THINK]"),
        ("<｜tool▁calls▁begin｜>```json</think>", "deepseek_r1", "<think>"),
        ('<|start_header_id|> "parameters": ', "llama", None),
        (
            "<|channel|>analysis<|message|> <|channel|>commentary <|call|>",
            "harmony",
            "<|channel|>analysis<|message|>",
        ),
        ("plain", None, None),
        ("plain </think>", None, "<think>"),
    ],
)
def test_a_chat_template_tells_the_format(
    template: str, name: str | None, thought: str | None
) -> None:
    answers = answer_format(template)
    assert (answers.calls and answers.calls.name) == name
    assert (answers.thought and answers.thought.begin) == thought


def test_a_named_format_counts_more_than_the_template() -> None:
    assert answer_format("<tool_call>", "llama").calls is FORMATS["llama"]
    assert answer_format("<tool_call>", "none").calls is None
    with pytest.raises(OutriderError, match="tool-format must be none or one of"):
        answer_format("", "lama")


THINKING = [form for form in FORMATS.values() if form.thought is not None]


ONE_THOUGHT = [
    form for form in THINKING if form.thought is not None and not form.thought.is_message
]


@pytest.mark.parametrize("form", ONE_THOUGHT, ids=lambda form: form.name)
@pytest.mark.parametrize("step", [1, 4, 1000])
def test_an_answer_has_one_thought_at_most(form: ToolFormat, step: int) -> None:
    """Marks of a thought in the content are text: a model cannot hide text by them."""
    assert form.thought is not None
    begin, end = form.thought.begin, form.thought.end
    again = f"{begin}again{end}"
    reader_parts = parts_of(form, f"{begin}why{end}{again} It is.", forced=False, step=step)
    thought = "".join(part.text for part in reader_parts if isinstance(part, Reasoning))
    content = "".join(part.text for part in reader_parts if isinstance(part, Content))
    assert (thought, content) == ("why", f"{again} It is.")


THINKING = [form for form in FORMATS.values() if form.thought is not None]


@pytest.mark.parametrize("form", THINKING, ids=lambda form: form.name)
def test_a_call_within_a_thought_ends_the_thought(libraries: Libraries, form: ToolFormat) -> None:
    assert form.thought is not None
    [arguments] = written(form, "plain")
    call = answer_text(form, [call_text(form, "f", arguments)])
    for forced in (True, False):
        grammar = calls_grammar(form, use_of(form, forced=forced), form.thought, "open")
        trial = Trial(libraries, 4096, (EOS,))
        compiled = compile_only(libraries, trial.translated(grammar))
        after = "" if form.thought.is_message else form.thought.after
        for between in ("", f"{form.thought.end}{after}"):
            matcher = compiled.matcher()
            assert matcher.accept_bytes(f"I look.\n{between}{call}".encode())
            assert matcher.accept(EOS)
            reading = Reading(form, TOOLS, form.thought, begins_in_thought=True, is_forced=forced)
            reader = AnswerReader(reading)
            parts = [part for each in f"I look.\n{between}{call}" for part in reader.push(each)]
            parts += reader.finish()
            thought = "".join(part.text for part in parts if isinstance(part, Reasoning))
            assert thought == "I look."
            assert [name for name, _ in calls_of(parts)] == ["f"]
        if forced:
            # The grammar allows no end of the text before a call.
            matcher = compiled.matcher()
            assert matcher.accept_bytes(b"I look.")
            assert not matcher.accept(EOS)


# Formats with sections are left out: their mark begins a section even within a thought.
SPOKEN = [form for form in THINKING if not form.sections]


@pytest.mark.parametrize("form", SPOKEN, ids=lambda form: form.name)
def test_a_thought_may_speak_of_a_call(libraries: Libraries, form: ToolFormat) -> None:
    assert form.thought is not None
    text = f"A call begins with {form.trigger}, and I need none."
    grammar = calls_grammar(form, use_of(form, forced=False), form.thought, "open")
    trial = Trial(libraries, 4096, (EOS,))
    matcher = compile_only(libraries, trial.translated(grammar)).matcher()
    assert matcher.accept_bytes(f"{text}{form.thought.end}\n\nNo.".encode())
    reader = AnswerReader(Reading(form, TOOLS, form.thought, begins_in_thought=True))
    whole = f"{text}{form.thought.end}\n\nNo."
    parts = [part for each in whole for part in reader.push(each)] + reader.finish()
    assert "".join(part.text for part in parts if isinstance(part, Reasoning)) == text
    assert "".join(part.text for part in parts if isinstance(part, Content)) == "No."


PLAIN = [
    '{"name": "Ada", "age": 36}',
    '```json\n[{"name": "f"}, {"name": "f_"}]\n```',
    '{"name": "f", "arguments": {}}',
    '{"name": "f_2x", "parameters": {}}',
    '{"name": "f", "par',
]


@pytest.mark.parametrize("text", PLAIN)
def test_json_that_begins_as_a_call_of_llama_does_is_text(libraries: Libraries, text: str) -> None:
    form = FORMATS["llama"]
    matcher = compiled_for(libraries, form, forced=False).matcher()
    assert matcher.accept_bytes(text.encode())
    assert matcher.accept(EOS)
    for step in (1, 3, 1000):
        parts = parts_of(form, text, forced=False, step=step)
        assert "".join(part.text for part in parts if isinstance(part, Content)) == text
        assert not calls_of(parts)


def test_an_answer_of_llama_may_be_any_json_beside_calls(libraries: Libraries) -> None:
    schema = {"type": ["object", "array"], "items": {"$ref": "#/$defs/n"}, "$defs": {"n": {}}}
    answer = Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema))
    form = FORMATS["llama"]
    [arguments] = written(form, "plain")
    grammar = calls_grammar(form, use_of(form, forced=False), None, "over", answer)
    compiled = compile_only(libraries, Trial(libraries, 4096, (EOS,)).translated(grammar))
    for text in ('{"name": "Ada"}', '{"a": 1}', "{}", "[1]", call_text(form, "f", arguments)):
        matcher = compiled.matcher()
        assert matcher.accept_bytes(text.encode()), text
        assert matcher.accept(EOS), text


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "boolean"}, "True", True),
        ({"type": ["boolean", "null"]}, "None", None),
        ({"type": "integer"}, "5.0", 5),
        ({"type": "number"}, " 5.0 ", 5.0),
        ({"type": "string"}, "None", "None"),
        ({"type": ["string", "null"]}, "None", "None"),
        ({"type": ["string", "null"]}, "null", None),
        ({"type": "array"}, '["</parameter>"]', ["</parameter>"]),
        ({"type": "integer"}, "1" * 5000, int("1" * 4000)),
        ({"type": "integer"}, "many", "many"),
        ({"type": ["string", "null"]}, '{"', '{"'),
        ({"type": ["string", "array"]}, ' ["', ' ["'),
    ],
    ids=str,
)
def test_a_value_as_python_writes_it_becomes_json(schema: Any, text: str, value: Any) -> None:
    form = FORMATS["qwen_3_coder"]
    parameters = {"type": "object", "properties": {"p": schema}}
    reader = AnswerReader(Reading(form, {"f": parameters}, held=frozenset("f")))
    parts = reader.push(call_text(form, "f", f"<parameter=p>\n{text}\n</parameter>\n"))
    [(_, arguments)] = calls_of([*parts, *reader.finish()])
    if len(text) > 4000:
        assert arguments == f'{{"p": {text}}}'
    else:
        assert json.loads(arguments) == {"p": value}


def test_a_mark_may_be_a_special_token_or_be_spelled(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    form = FORMATS["glm_4_7"]
    tokenizer: Any = AutoTokenizer.from_pretrained(TARGET)
    names = ["<tool_call>", "</tool_call>", "<arg_value>", "</arg_value>"]
    tokenizer.add_special_tokens({"additional_special_tokens": names})
    tokenizer.save_pretrained(tmp_path)
    libraries = Libraries(str(tmp_path), len(tokenizer), (EOS,))
    trial = Trial(libraries, len(tokenizer), (EOS,))
    [arguments] = written(form, "plain")
    text = call_text(form, "f", arguments)
    for forced in (True, False):
        grammar = calls_grammar(form, use_of(form, forced=forced), None, "over")
        compiled = compile_only(libraries, trial.translated(grammar))
        whole = text if forced else f"So: {text}"
        spelled = compiled.matcher()
        assert spelled.accept_bytes(whole.encode())
        assert spelled.accept(EOS)
        matcher = compiled.matcher()
        ids = tokenizer.encode(whole, add_special_tokens=False)
        assert len(set(ids) & set(tokenizer.convert_tokens_to_ids(names))) == len(names)
        assert all(map(matcher.accept, ids))
        assert matcher.accept(EOS)


@pytest.mark.parametrize(
    ("arguments", "right"),
    [
        ("<parameter=a>x</parameter><parameter=b>1</parameter>", True),
        ("<parameter=a>x</parameter>", True),
        ("<parameter=b>1</parameter>", False),
        ("<parameter=b>1</parameter><parameter=a>x</parameter>", False),
        ("<parameter=a>x</parameter><parameter=c>1</parameter>", False),
        ("<parameter=a>x</parameter><parameter=b>x</parameter>", False),
        ("", False),
    ],
)
def test_forced_parameters_follow_the_schema(
    libraries: Libraries, arguments: str, right: bool
) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"type": "string"}, "b": {"type": "integer"}},
        "required": ["a"],
        "additionalProperties": False,
    }
    form = FORMATS["mimo"]
    grammar = calls_grammar(form, ToolUse([Tool("f", schema)], is_forced=True), None, "over")
    compiled = compile_only(libraries, Trial(libraries, 4096, (EOS,)).translated(grammar))
    assert compiled.matcher().accept_bytes(call_text(form, "f", arguments).encode()) == right


@pytest.mark.parametrize("form", [FORMATS[name] for name in ("hermes", "mimo")], ids=str)
@pytest.mark.parametrize(
    ("more", "arguments", "right"),
    [
        ({}, {"a": {"b": 1}}, True),
        ({}, {"a": {"b": 1}, "c": 1}, False),
        ({}, {"a": {"b": 1, "c": 1}}, False),
        ({"additionalProperties": True}, {"a": {"b": 1}, "c": 1}, True),
        ({"allOf": [{"properties": {"c": {"type": "integer"}}}]}, {"a": {"b": 1}, "c": 1}, True),
    ],
)
def test_a_forced_call_invents_no_arguments(
    libraries: Libraries, form: ToolFormat, more: Any, arguments: Any, right: bool
) -> None:
    inner = {"type": "object", "properties": {"b": {"type": "integer"}}}
    schema = {"type": "object", "properties": {"a": inner}, **more}
    grammar = calls_grammar(form, ToolUse([Tool("f", schema)], is_forced=True), None, "over")
    compiled = compile_only(libraries, Trial(libraries, 4096, (EOS,)).translated(grammar))
    text = json.dumps(arguments)
    if form.style == "qwen_xml":
        text = "".join(
            f"<parameter={key}>{json.dumps(value)}</parameter>" for key, value in arguments.items()
        )
    assert compiled.matcher().accept_bytes(call_text(form, "f", text).encode()) == right
