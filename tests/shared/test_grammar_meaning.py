"""Schemas and regexes mean what JSON Schema, ECMAScript and Python say.

What we cannot enforce is refused by an error that names it.
"""

from __future__ import annotations

import json
import random
import re
from typing import Any

import pytest

from outrider.errors import OutriderError
from outrider.grammar.characters import any_case, complement, python_class
from outrider.grammar.guard import Guard
from outrider.grammar.kinds import Grammar, GrammarKind
from tests.shared.grammar_texts import WAYS, Way, compiler, schema, takes, walk

PATTERNED = [
    r"^x\ty$",
    r"^\\[nt]$",
    r'^"\x5c"$',
    r"^D:\\[0-9]{2}$",
    r"^[\^-]{2}$",
    r"^\W$",
    r"^(?i:ok)$",
]
PATTERNED_FIELDS = {
    "pattern": lambda text: {"type": "string", "pattern": text},
    "patternProperties": lambda text: {
        "type": "object",
        "patternProperties": {text: {"const": 1}},
        "additionalProperties": False,
        "minProperties": 1,
        "maxProperties": 1,
    },
    "propertyNames": lambda text: {
        "type": "object",
        "propertyNames": {"pattern": text},
        "additionalProperties": {"const": 1},
        "minProperties": 1,
        "maxProperties": 1,
    },
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("keyword", PATTERNED_FIELDS)
@pytest.mark.parametrize("pattern", PATTERNED)
def test_a_pattern_is_matched_by_the_value_that_the_text_stands_for(
    pattern: str, keyword: str, way: Way
) -> None:
    compiled = compiler().compile(way(schema(PATTERNED_FIELDS[keyword](pattern))))
    texts = [walk(compiled, random.Random(seed)) for seed in range(6)]
    assert any(texts)
    for text in filter(None, texts):
        value = json.loads(text)
        assert re.search(pattern, value if keyword == "pattern" else next(iter(value)))


ACCEPTED: list[tuple[Any, str, bool]] = [
    ({"type": "string", "pattern": "b+"}, '"abc"', True),
    ({"type": "string", "pattern": "b+"}, '"ac"', False),
    ({"type": "string", "pattern": "^a|c$"}, '"xc"', True),
    ({"type": "string", "pattern": "^.$"}, '"\\n"', False),
    ({"type": "number", "minimum": 3e-8, "maximum": 4e-8}, "0.000000035", True),
    ({"type": "number", "exclusiveMinimum": 0, "maximum": 0.25}, "0", False),
    ({"const": 2.2}, "2.2", True),
    ({"$ref": "#n", "$defs": {"a": {"$anchor": "n", "type": "integer"}}}, '"x"', False),
    ({"type": "string", "format": "json-pointer"}, '"/a\\ "', False),
    ({"type": "string", "format": "date"}, '"2023-02-29"', False),
    ({"type": "string", "format": "date"}, '"2024-02-29"', True),
    *[
        ({"type": kind, "format": form}, text, True)
        for kind, form, text in (
            ("integer", "int32", "7"),
            ("integer", "uint64", "7"),
            ("number", "double", "1.5"),
            ("boolean", "checkbox", "true"),
            ("integer", "date-time", "7"),
            ("array", "iri", "[]"),
            ("string", "password", '"x"'),
            (["integer", "null"], "unix-time", "null"),
        )
    ],
    ({"properties": {"a": {"type": "integer"}}, "type": "object"}, '{"\\u0061": "x"}', False),
    ({"type": "object", "properties": {"a": {}}}, '{"b": 1}', True),
]


@pytest.mark.parametrize(("value", "text", "right"), ACCEPTED, ids=str)
def test_a_schema_takes_the_texts_that_json_schema_does(value: Any, text: str, right: bool) -> None:
    assert takes(compiler().compile(schema(value)), text) == right


@pytest.mark.parametrize(
    ("pattern", "text", "right"),
    [
        (r"[\^b]{2}", "^b", True),
        (r"[\^b]{2}", "aa", False),
        (r"\Ax\Z", "x", True),
        (r"\x42c", "Bc", True),
        (".", "\n", False),
        (r"\w", "é", True),
        (r"(?i)k", "K", True),
        (r"(?a)\w", "é", False),
        (r"(?a)(?u:\w)", "é", True),
        (r"(?a)(?u:\W)", "é", False),
        # U+0345 is another case of the letter U+0399.
        (r"(?i)\w", "\u0345", False),
        (r"(?i)[^\W]", "\u0399", True),
        (r"a{2}|b", "aa", True),
    ],
)
def test_a_regex_means_what_python_says(pattern: str, text: str, right: bool) -> None:
    for way in WAYS:
        grammar = way(Grammar(GrammarKind.REGEX, pattern))
        assert takes(compiler().compile(grammar), text) == right


@pytest.mark.parametrize(
    ("pattern", "named"),
    [
        ("x^y", r"\^ or"),
        ("x$y", r"\$ or"),
        (r"\bx", r"\\b"),
        (r"\h", r"\\h"),
        (r"\pL", r"\\p"),
        ("x++", "possessive"),
        ("(?>x)", "atomic"),
        ("(?<=x)y", "lookaround"),
        (r"(x)\1", "backreference"),
        (r"\ud800", "surrogate"),
    ],
)
def test_a_construct_that_cannot_be_enforced_is_refused_by_name(pattern: str, named: str) -> None:
    for grammar in (
        Grammar(GrammarKind.REGEX, pattern),
        schema({"type": "string", "pattern": pattern}),
    ):
        with pytest.raises(OutriderError, match=named) as refused:
            compiler().compile(grammar)
        assert refused.value.field == grammar.field


@pytest.mark.parametrize(
    ("value", "named"),
    [
        ({"type": "string", "pattern": r"^\v$"}, "control character"),
        ({"type": "string", "pattern": "a{,2}"}, "different things"),
        ({"const": 2**53 + 2}, "const"),
        ({"type": "number", "minimum": 1e-300}, "minimum"),
        ({"$ref": "#/x", "x": {"type": "string", "not": {}}}, "leads to no schema"),
        ({"type": "object", "minProperties": 2}, "minProperties"),
        ({"type": "string", "not": {"const": "a"}, "x-guidance": {"lenient": True}}, "uses not"),
        ({"type": "integer", "minimum": "3"}, "minimum"),
    ],
    ids=str,
)
def test_a_schema_that_cannot_be_enforced_is_refused_by_keyword(value: Any, named: str) -> None:
    with pytest.raises(OutriderError, match=named):
        compiler().compile(schema(value))


@pytest.mark.parametrize(
    ("text", "right", "wrong"),
    [
        (r'root ::= "\x43d" [\x41b]', "CdA", "Cdc"),
        (r'root ::= "\u00e9" [\U0001F600-\U0001F602]', "é😁", "e😁"),
        ('root ::= [a-z]* "b"', "aab", "aa"),
        ('root ::= . "x"', "\nx", "x"),
        (r'root ::= [^\]"\\]+', "a[&~", 'a"'),
        (r'root ::= "\\" "[" "/" "\t"', "\\[/\t", "\\[/t"),
        ("root ::= [a&&b~~d/[-]+", "&-~/[", "e"),
        ('root ::= "(" root ")" | [a-z]+', "((ab))", "((ab)"),
        ('root ::= a{2,3} # "x"\na ::= b "," |\n  b ";"\nb ::= [0-9]', "1,2;", "1,"),
    ],
)
def test_gbnf_means_what_llama_cpp_says(text: str, right: str, wrong: str) -> None:
    compiled = compiler().compile(Grammar(GrammarKind.EBNF, text))
    assert takes(compiled, right)
    assert not takes(compiled, wrong)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        (r'root ::= "\q"', r"escape \\q"),
        (r'root ::= "\ud800"', "no text can hold"),
        ('root ::= "a"\nroot ::= "b"', "defines a rule twice"),
        ('root ::= b-c b_c\nb-c ::= "x"\nb_c ::= "y"', "no GBNF"),
    ],
)
def test_gbnf_that_would_be_misread_is_refused(text: str, named: str) -> None:
    with pytest.raises(OutriderError, match=named):
        compiler().compile(Grammar(GrammarKind.EBNF, text))


def test_classes_are_those_of_python_for_every_character() -> None:
    text = "".join(map(chr, range(0x10FFFF + 1)))
    for source, found in (
        (r"\W", complement(python_class("w", ascii_only=False))),
        (r"(?i)[^ks]", complement(any_case(((0x6B, 0x6B), (0x73, 0x73)), ascii_only=False))),
    ):
        pattern = re.compile(source)
        matched = sum(
            high - low + 1 for low, high in found if all(map(pattern.match, text[low : high + 1]))
        )
        surrogates = len(pattern.findall(text[0xD800:0xE000]))
        assert matched == len(pattern.findall(text)) - surrogates


def test_the_guard_refuses_a_text_that_the_grammar_should_not_allow() -> None:
    own = compiler()
    compiled = own.compile(Grammar(GrammarKind.REGEX, "[ab]{3}"))
    guard = Guard(own._libraries.token_bytes, (0, 3))
    guard.check(compiled, Grammar(GrammarKind.REGEX, "[a-c]{3}"))
    with pytest.raises(OutriderError, match="would allow"):
        guard.check(compiled, Grammar(GrammarKind.REGEX, "c{3}"))
