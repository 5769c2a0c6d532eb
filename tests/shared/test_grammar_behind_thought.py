"""A grammar binds the text after a thought exactly as it binds a text without a thought."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from outrider.errors import OutriderError
from outrider.grammar.backends import Compiled, TextMatcher
from outrider.grammar.guard import Guard
from outrider.grammar.kinds import FreeThought, Grammar, GrammarKind
from tests.shared.grammar_texts import ENDS, TOKENIZER, VOCAB, allowed, compiler, in_tag, schema
from tests.shared.json_schemas import schemas
from tests.shared.test_grammar import BAD, OTHERS

POSSIBLE = FreeThought("<think>", "</think>", "\n\n")
OPEN = FreeThought("", "</think>")
# The bundled tokenizer has special tokens of these names.
SPECIAL = FreeThought("<|user|>", "<|assistant|>")
USER, ASSISTANT = (TOKENIZER.token_to_id(name) for name in ("<|user|>", "<|assistant|>"))
NESTED = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}
GRAMMARS = [
    *(grammar for grammar, _ in OTHERS),
    *(in_tag(grammar) for grammar, _ in OTHERS[:2]),
    *map(schema, schemas(4, seed=2)),
    schema({"const": "</think>}\n\n{<think>"}),
    Grammar(GrammarKind.EBNF, 'root ::= ("}" root | [{}]) # }'),
    Grammar(GrammarKind.REGEX, "[}{]*(?:</think>)?\n*"),
]


def encoded(text: str) -> list[int]:
    return list(TOKENIZER.encode(text, add_special_tokens=False).ids)


def after(grammar: Grammar, thought: FreeThought | None, text: str = "") -> TextMatcher:
    """Return a matcher of the grammar behind the thought, after it has read `text`."""
    matcher = compiler().compile(replace(grammar, thought=thought)).matcher()
    for token in encoded(text):
        assert matcher.accept(token), text
    return matcher


def may_follow(matcher: TextMatcher) -> set[int]:
    mask = np.zeros((1, -(-VOCAB // 32)), np.int32)
    matcher.fill(mask, 0)
    return set(map(int, allowed(mask)))


@pytest.mark.parametrize(
    ("thought", "text"),
    [
        (POSSIBLE, '<think>It {is} "so".\n</think>\n\n'),
        (POSSIBLE, "<think></think>\n\n"),
        (OPEN, "<think> naïve 😀</think>"),
        (SPECIAL, "<|user|>so<|assistant|>"),
    ],
)
@pytest.mark.parametrize("grammar", GRAMMARS, ids=lambda grammar: grammar.kind.value)
def test_what_follows_a_thought_is_masked_as_it_would_be_alone(
    grammar: Grammar, thought: FreeThought, text: str
) -> None:
    rng = random.Random(text)
    alone, behind = after(grammar, None), after(grammar, thought, text)
    for _ in range(24):
        choices = may_follow(alone)
        assert may_follow(behind) == choices
        assert alone.jump_forward() == behind.jump_forward()
        token = rng.choice(sorted(choices))
        assert alone.accept(token)
        assert behind.accept(token)
        if token in ENDS:
            assert behind.ended
            break


@pytest.mark.parametrize("grammar", GRAMMARS, ids=lambda grammar: grammar.kind.value)
@pytest.mark.parametrize(
    ("thought", "begun"), [(POSSIBLE, "<think>so"), (OPEN, ""), (OPEN, "so </thin")]
)
def test_a_thought_may_be_any_text_and_never_ends_the_answer(
    grammar: Grammar, thought: FreeThought, begun: str
) -> None:
    matcher = after(grammar, thought, begun)
    texts = {encoded(text)[0] for text in ("a", " {", '"', "\n\n", "é", "<")}
    free = may_follow(matcher)
    assert texts <= free
    assert not free & set(ENDS)
    assert matcher.jump_forward() == b""
    assert all(matcher.accept(token) for token in encoded("x" * 2000))


@pytest.mark.parametrize("grammar", GRAMMARS, ids=lambda grammar: grammar.kind.value)
def test_a_thought_that_the_prompt_does_not_begin_may_be_left_out(grammar: Grammar) -> None:
    alone, behind = may_follow(after(grammar, None)), may_follow(after(grammar, POSSIBLE))
    assert alone <= behind
    begins = {token for token in range(4, 4000) if "<think>".startswith(TOKENIZER.decode([token]))}
    assert behind - alone <= begins
    assert encoded("<think>")[0] in behind


def test_a_special_token_that_begins_or_ends_a_thought_may_be_spelled_too() -> None:
    grammar = schema(NESTED)
    for begin in ([USER], encoded("<|us") + encoded("er|>")):
        for end in ([ASSISTANT], encoded("<|assis") + encoded("tant|>")):
            matcher = after(grammar, SPECIAL)
            for token in [*begin, *encoded("so"), *end, *encoded('{"a"')]:
                assert matcher.accept(token)
            # Within the answer, a special token is not text.
            assert matcher.accept(encoded(': "')[0])
            assert ASSISTANT not in may_follow(matcher)


def test_a_special_token_may_not_be_a_part_of_a_thought() -> None:
    matcher = after(schema(NESTED), OPEN, "so")
    assert not {USER, ASSISTANT, *ENDS} & may_follow(matcher)


@pytest.mark.parametrize("grammar", BAD, ids=lambda grammar: grammar.text[:40])
def test_a_bad_grammar_is_refused_behind_a_thought_too(grammar: Grammar) -> None:
    messages = []
    for thought in (None, OPEN):
        with pytest.raises(OutriderError) as refused:
            compiler().compile(replace(grammar, thought=thought))
        messages.append((refused.value.message, refused.value.field))
    assert messages[0] == messages[1]


def test_the_masks_of_the_answer_are_tried_out_and_not_those_of_the_thought() -> None:
    # Up to 1024 letters; each rule makes its first half optional.
    rules = [f"r{i} ::= r{i + 1}? r{i + 1}" for i in range(10)]
    slow = "\n".join(["root ::= r0", *rules, "r10 ::= [a-z]"])
    with pytest.raises(OutriderError, match="can be read in too many ways"):
        compiler().compile(Grammar(GrammarKind.EBNF, slow, thought=OPEN))


def test_random_texts_of_the_answer_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[Grammar] = []
    was = Guard.check

    def check(self: Guard, compiled: Compiled, grammar: Grammar) -> None:
        checked.append(grammar)
        # The check refuses what is no JSON, so this shows that the checked text has no thought.
        was(self, compiled, grammar)

    monkeypatch.setattr(Guard, "check", check)
    own = schema(NESTED | {"title": "of this test alone"})
    compiler().compile(replace(own, thought=OPEN))
    assert [grammar.kind for grammar in checked] == [GrammarKind.JSON_SCHEMA]
