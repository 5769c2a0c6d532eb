"""Grammars that would take too long are refused; other large grammars are compiled."""

from __future__ import annotations

import json
import random
import time
from typing import Any

import numpy as np
import pytest

from outrider.errors import OutriderError
from outrider.grammar.backends import _LL_LIMITS, Compiled, MaskLimit
from outrider.grammar.compiler import GrammarCompiler
from outrider.grammar.dialect import translate
from outrider.grammar.kinds import Grammar, GrammarKind
from outrider.grammar.repetition import check_ebnf, check_pattern
from outrider.protocol.limits import MAX_GRAMMAR_CHARACTERS
from tests.shared.grammar_texts import (
    ENDS,
    TARGET,
    TOKENIZER,
    VOCAB,
    WAYS,
    Way,
    allowed,
    compiler,
    in_tag,
    schema,
    walk,
)


def named(count: int, **counts: int) -> Grammar:
    """Return a JSON schema of an object with `count` named properties."""
    properties = {f"p{i}": {"type": "integer"} for i in range(count)}
    return schema({"type": "object", "properties": properties, **counts})


TOO_OFTEN = [
    Grammar(GrammarKind.REGEX, "((a{1,1000}){1,1000}){1,1000}"),
    Grammar(GrammarKind.REGEX, r"([\]{1}(]{200}){100}"),
    Grammar(GrammarKind.REGEX, "a{10001,}"),
    Grammar(GrammarKind.REGEX, "(([ab]{0,90}c?){1,90}|d)" * 20),
    Grammar(GrammarKind.EBNF, 'root ::= a a\na ::= "x"{5000} "y"{5000} | "z" {2}'),
    Grammar(GrammarKind.EBNF, 'root ::= "x"{1,100000}'),
    Grammar(GrammarKind.EBNF, 'root ::= "x"{1,4294967297}'),
    Grammar(GrammarKind.EBNF, 'root ::= "x" {4294967299 # }\n}'),
    Grammar(GrammarKind.EBNF, 'root ::= (["(] "x"{1, 200} # )\n "}"){100}'),
    schema(
        {"type": "array", "items": {"type": "string", "pattern": "^((a{1,1000}){1,1000}){1,1000}$"}}
    ),
    schema({"type": "object", "patternProperties": {"^(a{200}){200}$": {}}}),
]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("grammar", TOO_OFTEN, ids=lambda grammar: grammar.text[:40])
def test_too_many_repetitions_are_refused_with_the_limit(grammar: Grammar, way: Way) -> None:
    asked = way(grammar)
    reason = f"{asked.field} repeats more than 10000 times"
    with pytest.raises(OutriderError, match=reason):
        compiler().compile(asked)


def test_too_many_repetitions_within_a_structural_tag_are_refused() -> None:
    often: Any = {"type": "const_string", "value": "a"}
    for _ in range(3):
        often = {
            "type": "sequence",
            "elements": [{"type": "repeat", "min": 1, "max": 100, "content": often}],
        }
    for part in (
        {"type": "regex", "pattern": "(a{900}){90}"},
        often,
    ):
        tag = json.dumps({"type": "structural_tag", "format": part})
        with pytest.raises(OutriderError, match="structural_tag repeats more than 10000 times"):
            compiler().compile(Grammar(GrammarKind.STRUCTURAL_TAG, tag))


def test_counted_properties_beside_optional_ones_are_refused() -> None:
    for way in WAYS:
        with pytest.raises(OutriderError, match="minProperties or maxProperties beside"):
            compiler().compile(way(named(101, maxProperties=20_000)))


FINE = [
    Grammar(GrammarKind.REGEX, "[0-9]{1,50}-[a-z]{1,50}-(a|b){1,50}-x{500}"),
    Grammar(GrammarKind.REGEX, "(ab{2}){3}"),
    Grammar(GrammarKind.REGEX, "(a{2}){3}" * 1000),
    Grammar(GrammarKind.REGEX, r"[{20000}]\{20000}"),
    Grammar(
        GrammarKind.EBNF,
        'root ::= line{1,100}\nline ::= ("{99999}" | [{9] | x) "\\n" # {99999}\nx ::= "x"{1,100}',
    ),
    schema(
        {
            "type": "array",
            "maxItems": 1000,
            "items": {
                "type": "array",
                "maxItems": 1000,
                "items": {"type": "string", "maxLength": 99},
            },
        }
    ),
]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("grammar", FINE, ids=lambda grammar: grammar.text[:40])
def test_acceptable_repetitions_compile(grammar: Grammar, way: Way) -> None:
    compiler().compile(way(grammar))


@pytest.mark.parametrize(
    "text", ["[", "{", '"', "(", "\\p{", "a[a", 'a["', "Regex(", "{#", "a[a\n"]
)
def test_checking_repetitions_takes_linear_time(text: str) -> None:
    started = time.thread_time()
    for check in (check_pattern, check_ebnf):
        check((text * 65_536)[:65_536], "field")
    assert time.thread_time() - started < 2


def test_an_ambiguous_grammar_with_slow_masks_is_refused() -> None:
    # Up to 1024 letters; each rule makes its first half optional.
    rules = [f"r{i} ::= r{i + 1}? r{i + 1}" for i in range(10)]
    grammar = Grammar(GrammarKind.EBNF, "\n".join(["root ::= r0", *rules, "r10 ::= [a-z]"]))
    reason = r"grammar\.ebnf can be read in too many ways: (masks .* longer than 50 ms|its masks)"
    with pytest.raises(OutriderError, match=reason):
        compiler().compile(grammar)


def references(links: int) -> Grammar:
    """Return a JSON schema with a chain of references."""
    parts = {str(i): {"type": "array", "items": {"$ref": f"#/$defs/{i + 1}"}} for i in range(links)}
    whole = {"$ref": "#/$defs/0", "$defs": {**parts, str(links): {}}}
    return Grammar(GrammarKind.JSON_SCHEMA, json.dumps(whole, separators=(",", ":")))


def aliases(links: int) -> Grammar:
    """Return a GBNF grammar with a chain of rules."""
    rules = [f"a{i}::=a{i + 1}" for i in range(links)]
    return Grammar(GrammarKind.EBNF, "\n".join(["root::=a0", *rules, f'a{links}::="["']))


def test_the_longest_chain_of_rules_does_not_end_the_process() -> None:
    """Only compiling needs the large stack; masks are computed on an ordinary thread."""
    # A loaded machine would reach the usual time limit.
    own = GrammarCompiler(TARGET, VOCAB, ENDS, compile_seconds=60.0)
    for grammar in (references(1200), in_tag(references(1200)), aliases(4700)):
        assert 0.95 * MAX_GRAMMAR_CHARACTERS < len(grammar.text) <= MAX_GRAMMAR_CHARACTERS
        matcher = own.compile(grammar).matcher()
        mask = np.zeros((1, -(-VOCAB // 32)), np.int32)
        matcher.fill(mask, 0)
        bracket = TOKENIZER.token_to_id("[")
        assert bracket in allowed(mask)
        assert matcher.accept(bracket)
        matcher.fill(mask, 0)


def compiled_unchecked(grammar: Grammar) -> Compiled:
    """Return the compiled grammar, without a trial of its masks."""
    libraries = compiler()._libraries
    return libraries.compile(translate(grammar, libraries.specials))


def test_a_mask_that_the_backend_gives_up_on_is_the_grammars_fault(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Even late in a text, the request ends with this error instead of an empty mask."""
    monkeypatch.setitem(_LL_LIMITS, "step_lexer_fuel", 60)
    grammar = Grammar(GrammarKind.REGEX, "(a|b|c){1,50}[0-9]{3}")
    with pytest.raises(OutriderError, match="its masks became too expensive") as refused:
        compiler().compile(grammar)
    assert refused.value.field == "grammar.regex"
    with pytest.raises(MaskLimit):
        walk(compiled_unchecked(grammar), random.Random(0))


def test_a_mask_that_is_too_expensive_ends_neither_its_text_nor_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The library's matchers of a grammar share a lexer. If it fails, all matchers fail."""
    monkeypatch.setitem(_LL_LIMITS, "step_lexer_fuel", 40)
    grammar = Grammar(GrammarKind.REGEX, "[0-9]{1,4}|z(a|b|c){1,50}[0-9]{3}")
    compiled = compiled_unchecked(grammar)
    mask = np.zeros((1, compiler().mask_width), np.int32)
    costly, *cheap = [compiler().token_bytes.index(text) for text in (b"z", b"1", b"2", b"3")]
    begun = compiled.matcher()
    assert begun.accept(cheap[0])
    advanced = begun.fork()
    failing = compiled.matcher()
    assert failing.accept(costly)
    with pytest.raises(MaskLimit):
        failing.fill(mask, 0)
    # The matcher of another text meets the failure in one of these calls.
    assert advanced.accept(cheap[1])
    failing.rollback(1)
    for matcher, left in (
        (failing, cheap),
        (begun, cheap[1:]),
        (advanced, cheap[2:]),
        (compiled.matcher(), cheap),
    ):
        for token in left:
            matcher.fill(mask, 0)
            assert token in allowed(mask)
            assert matcher.accept(token)
