"""Harmony, the format of gpt-oss: an answer has messages for thought, content and calls."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gateway.tools.definitions import Tool, ToolUse
from gateway.tools.formats import FORMATS
from gateway.tools.grammar import calls_grammar
from gateway.tools.reader import (
    AnswerReader,
    CallArguments,
    CallBegin,
    Content,
    Reading,
    Reasoning,
    joined,
)
from outrider.grammar.backends import Libraries
from outrider.grammar.kinds import Grammar, GrammarKind
from outrider.grammar.trial import Trial, compile_only
from tests.gateway.gateway_rig import TARGET

EOS = 0
FORM = FORMATS["harmony"]
THOUGHT = FORM.thought
assert THOUGHT is not None
SCHEMA: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "integer"}}}
ANALYSIS = "<|channel|>analysis<|message|>"
NEXT = "<|end|><|start|>assistant"
FINAL = "<|channel|>final<|message|>"
CALL = "<|channel|>commentary to=functions.f <|constrain|>json<|message|>"
# Maps texts after a prompt that ends with <|start|>assistant to their thought, content and calls.
ANSWERS = {
    f"{ANALYSIS}Hm.{NEXT}{FINAL}Paris.": ("Hm.", "Paris.", []),
    f"{FINAL}Paris.": ("", "Paris.", []),
    f"{FINAL}{FINAL} is a mark.": ("", f"{FINAL} is a mark.", []),
    f"{ANALYSIS}Hm.{NEXT}{ANALYSIS} Hm!{NEXT}{FINAL}Paris.": ("Hm. Hm!", "Paris.", []),
    f'{ANALYSIS}Hm.{NEXT}{CALL}{{"a": 1}}': ("Hm.", "", [("f", '{"a": 1}')]),
    f'{CALL}{{"a": 1}}': ("", "", [("f", '{"a": 1}')]),
    f"{ANALYSIS}Hm.{NEXT}{CALL[:20]}": ("Hm.", CALL[:20], []),
}


@pytest.mark.parametrize("step", [1, 4, 1000])
@pytest.mark.parametrize("text", ANSWERS)
def test_messages_become_thought_content_and_calls(text: str, step: int) -> None:
    reader = AnswerReader(Reading(FORM, {"f": SCHEMA}, THOUGHT))
    parts = [part for at in range(0, len(text), step) for part in reader.push(text[at : at + step])]
    parts = joined([*parts, *reader.finish()])
    names = [part.name for part in parts if isinstance(part, CallBegin)]
    arguments = [part.text for part in parts if isinstance(part, CallArguments)]
    found = (
        "".join(part.text for part in parts if isinstance(part, Reasoning)),
        "".join(part.text for part in parts if isinstance(part, Content)),
        list(zip(names, arguments, strict=True)),
    )
    assert found == ANSWERS[text]


def test_a_chats_prompt_lets_the_model_choose_its_first_message() -> None:
    assert THOUGHT is not None
    prompt = f"<|start|>user<|message|>Hi.{NEXT}"
    assert THOUGHT.state(prompt) == "possible"
    assert THOUGHT.state(prompt + ANALYSIS) == "open"


@pytest.fixture(scope="module")
def libraries() -> Libraries:
    return Libraries(TARGET, 4096, (EOS,))


def takes(libraries: Libraries, grammar: Grammar, text: str) -> bool:
    """Return whether the text is a complete answer of the grammar."""
    trial = Trial(libraries, 4096, (EOS,))
    matcher = compile_only(libraries, trial.translated(grammar)).matcher()
    return matcher.accept_bytes(text.encode()) and matcher.accept(EOS)


@pytest.mark.parametrize(
    ("text", "is_taken"),
    [
        (f'{ANALYSIS}Hm.{NEXT}{FINAL}{{"a": 1}}', True),
        (f'{FINAL}{{"a": 1}}', True),
        (f'{ANALYSIS}Hm.{NEXT}{CALL}{{"a": 1}}', True),
        (f'{ANALYSIS}Hm.{NEXT}{{"a": 1}}', False),
        (f'{ANALYSIS}Hm.{NEXT}{FINAL}{CALL}{{"a": 1}}', False),
        (f'{ANALYSIS}Hm.{NEXT}{FINAL}{{"a": "1"}}', False),
    ],
)
def test_an_answer_by_a_schema_is_a_message_of_its_own_beside_calls(
    libraries: Libraries, text: str, is_taken: bool
) -> None:
    answer = Grammar(GrammarKind.JSON_SCHEMA, json.dumps(SCHEMA | {"required": ["a"]}))
    use = ToolUse([Tool("f", SCHEMA)], is_forced=False, is_parallel=True)
    grammar = calls_grammar(FORM, use, THOUGHT, "possible", answer)
    assert takes(libraries, grammar, text) == is_taken
