"""A mask allows exactly the grammar's texts, also in structural tags; bad grammars are refused."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import jsonschema
import numpy as np
import pytest

from outrider.errors import OutriderError
from outrider.grammar.kinds import Grammar, GrammarKind
from tests.shared.grammar_texts import (
    ENDS,
    TOKENIZER,
    VOCAB,
    WAYS,
    Way,
    allowed,
    compiler,
    schema,
    walk,
)
from tests.shared.json_schemas import schemas


@pytest.mark.parametrize("way", WAYS)
def test_random_texts_under_a_schema_satisfy_it(way: Way) -> None:
    rng = random.Random(0)
    finished = 0
    for value in schemas(60, seed=1):
        text = walk(compiler().compile(way(schema(value))), rng)
        if text is not None:
            jsonschema.validate(json.loads(text), value, format_checker=jsonschema.FormatChecker())
            finished += 1
    assert finished >= 40


OTHERS = [
    (
        Grammar(GrammarKind.REGEX, "[a-f]{2,5}-[0-9]+"),
        lambda text: re.fullmatch("[a-f]{2,5}-[0-9]+", text),
    ),
    (
        Grammar(GrammarKind.CHOICE, choices=("yes", 'no "really"', "naïve 😀\n", "\x7f")),
        lambda text: text in ("yes", 'no "really"', "naïve 😀\n", "\x7f"),
    ),
    (
        Grammar(GrammarKind.EBNF, 'root ::= "<" [a-z]+ ">" | "none"'),
        lambda text: re.fullmatch("<[a-z]+>|none", text),
    ),
    (Grammar(GrammarKind.JSON_OBJECT), lambda text: isinstance(json.loads(text), dict)),
]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("grammar", "right"), OTHERS, ids=lambda value: getattr(getattr(value, "kind", ""), "value", "")
)
def test_every_kind_of_grammar_is_enforced(grammar: Grammar, right: Any, way: Way) -> None:
    texts = [walk(compiler().compile(way(grammar)), random.Random(seed)) for seed in range(12)]
    finished = [text for text in texts if text is not None]
    assert len(finished) >= 4
    assert all(right(text) for text in finished)


def test_a_structural_tag_constrains_its_part() -> None:
    tag = {
        "type": "structural_tag",
        "format": {
            "type": "triggered_tags",
            "triggers": ["<f>"],
            "tags": [
                {
                    "begin": "<f>",
                    "content": {"type": "json_schema", "json_schema": {"enum": [1, 2]}},
                    "end": "</f>",
                }
            ],
        },
    }
    grammar = Grammar(GrammarKind.STRUCTURAL_TAG, json.dumps(tag))
    matcher = compiler().compile(grammar).matcher()
    for token in TOKENIZER.encode("free text <f>", add_special_tokens=False).ids:
        assert matcher.accept(token)
    assert not matcher.accept(TOKENIZER.encode("x", add_special_tokens=False).ids[0])
    assert matcher.accept(TOKENIZER.encode("2", add_special_tokens=False).ids[0])


@pytest.mark.parametrize("way", WAYS)
def test_rollback_undoes_accepted_tokens_and_refusals_change_nothing(
    way: Way,
) -> None:
    compiled = compiler().compile(
        way(
            schema({"type": "object", "properties": {"a": {"enum": ["x", "y"]}}, "required": ["a"]})
        )
    )
    tokens = TOKENIZER.encode('{"a": "x"}', add_special_tokens=False).ids
    matcher = compiled.matcher()
    masks = np.zeros((len(tokens) + 1, -(-VOCAB // 32)), np.int32)
    again = np.zeros_like(masks)
    for i, token in enumerate([*tokens, None]):
        matcher.fill(masks, i)
        forbidden = next(t for t in range(4, 4000) if t not in set(allowed(masks, i)))
        assert not matcher.accept(forbidden)
        assert token is None or matcher.accept(token)
    assert matcher.accept(ENDS[0])
    assert matcher.ended
    assert not matcher.accept(tokens[0])
    matcher.rollback(1)
    for i in range(len(tokens), -1, -1):
        matcher.fill(again, i)
        matcher.rollback(min(i, 1))
    assert (masks == again).all()


BAD: list[Grammar] = [
    Grammar(GrammarKind.JSON_SCHEMA, "{"),
    Grammar(GrammarKind.JSON_SCHEMA, "[]"),
    schema({"type": "strange"}),
    schema(False),
    schema({"enum": []}),
    schema({"type": "integer", "not": {"const": 3}}),
    schema({"type": "array", "uniqueItems": True}),
    schema({"if": {}, "then": {}}),
    schema({"$ref": "https://example.org/schema"}),
    schema({"properties": {"a": {"type": "string", "format": "iri"}}}),
    schema({"oneOf": [{"type": "integer"}, {"type": "number"}]}),
    schema({"items": [{}]}),
    schema({"properties": 3}),
    schema(json.loads('{"items":' * 70 + "{}" + "}" * 70)),
    schema({"format": []}),
    schema({"oneOf": [{"type": [{}]}, {"type": "string"}]}),
    schema({"oneOf": [{"enum": 3}, {"enum": [4]}]}),
    Grammar(GrammarKind.JSON_SCHEMA, "[" * 60_000),
    Grammar(GrammarKind.JSON_SCHEMA, '{"items":' * 10_000),
    schema({"type": "number", "multipleOf": 0.5}),
    schema({"type": "string", "pattern": "^(?!b).*$"}),
    schema({"type": "string", "pattern": "^((a{1,1000}){1,1000}){1,1000}$"}),
    schema({"type": "integer", "multipleOf": 1025}),
    schema({"type": "integer", "multipleOf": 2.5}),
    schema({"type": "array", "items": {"type": "string", "maxLength": 2**33 + 1}}),
    schema({"type": "array", "minItems": -1}),
    schema({"type": "array", "maxItems": 2.5}),
    Grammar(GrammarKind.EBNF, "root ::= root"),
    Grammar(GrammarKind.REGEX, "(["),
    Grammar(GrammarKind.EBNF, "root ::= missing"),
    Grammar(GrammarKind.EBNF, "nonsense"),
]


# Schemas that a careless backend would enforce only in part.
HARD: list[Any] = [
    {"type": "string", "pattern": "a", "maxLength": 3},
    {"allOf": [{"type": "integer"}, {"minimum": 3}]},
    {"minimum": 3},
    {"required": ["a"]},
    {"type": "object", "required": ["a"]},
    {"$ref": "#/$defs/a", "minimum": 5, "$defs": {"a": {"type": "integer"}}},
    {"enum": [1, 2], "minimum": 2},
    {"type": "string", "enum": ["a", 1]},
    {"type": "string", "minLength": 3, "format": "uuid"},
    {"type": "integer", "multipleOf": 7, "minimum": 0},
    {"type": "integer", "multipleOf": 7, "maximum": 0},
    {"type": "integer", "multipleOf": 7, "minimum": 0, "maximum": 10_000},
    {"type": "integer", "multipleOf": 7, "exclusiveMinimum": 0, "exclusiveMaximum": 10_002},
    {"type": "number", "minimum": 1e-7},
    {"const": 1.1},
    {"$ref": "#a", "$defs": {"a": {"$anchor": "a", "type": "integer"}}},
    {"type": "object", "properties": {"a": {"const": 1}}, "additionalProperties": True},
    {"type": "object", "properties": {'"': {"const": 1}}},
]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("value", HARD, ids=lambda value: json.dumps(value)[:40])
def test_keywords_beside_others_are_enforced(value: Any, way: Way) -> None:
    walked = [walk(compiler().compile(way(schema(value))), random.Random(i)) for i in range(9)]
    for text in filter(None, walked):
        jsonschema.validate(json.loads(text), value, format_checker=jsonschema.FormatChecker())


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("grammar", BAD, ids=lambda grammar: grammar.text[:40])
def test_invalid_and_unenforceable_grammars_are_refused_by_field(
    grammar: Grammar, way: Way
) -> None:
    asked = way(grammar)
    with pytest.raises(OutriderError) as refused:
        compiler().compile(asked)
    assert refused.value.field == asked.field
    assert refused.value.reason.name == "INVALID_VALUE"


def test_unknown_or_broken_structural_tags_are_refused() -> None:
    unknown = {"type": "?"}
    unenforceable = {"type": "json_schema", "json_schema": {"not": {}}}
    tags = [{"type": "structural_tag", "format": part} for part in (unknown, unenforceable)]
    for text in (*map(json.dumps, tags), "["):
        with pytest.raises(OutriderError, match="structural_tag"):
            compiler().compile(Grammar(GrammarKind.STRUCTURAL_TAG, text))
