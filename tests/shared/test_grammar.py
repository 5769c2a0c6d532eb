"""Grammars: what the mask allows is what the grammar means, with either backend; what has no meaning is refused by name."""

from __future__ import annotations

import asyncio
import json
import random
import re
import threading
import time
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from json_schemas import schemas

from outrider.errors import OutriderError, Reason
from outrider.grammar import compiler as grammar_module
from outrider.grammar.backends import Backend, Compiled, Matcher
from outrider.grammar.cache import GrammarCache
from outrider.grammar.compiler import GrammarCompiler
from outrider.grammar.repetition import check_ebnf, check_pattern
from outrider.limits import MAX_GRAMMAR_CHARACTERS
from outrider.messages import Grammar, GrammarKind
from outrider.tokenizer import load_tokenizer

TARGET = str(Path(__file__).parents[2] / "models/target")
VOCAB = 4100  # wider than the tokenizer, as models' logits often are
ENDS = (0, 3)
BACKENDS: tuple[Backend, ...] = ("xgrammar", "llguidance")
TOKENIZER = load_tokenizer(TARGET)


@cache
def compiler(backend: Backend) -> GrammarCompiler:
    return GrammarCompiler(TARGET, VOCAB, ENDS, backend=backend)


def allowed(mask: np.ndarray, row: int = 0) -> np.ndarray:
    bits = np.unpackbits(mask[row].view(np.uint8), bitorder="little")
    return np.flatnonzero(bits[:VOCAB])


def walk(compiled: Compiled, rng: random.Random, limit: int = 400) -> str | None:
    """A text of tokens picked at random among those allowed, preferring an end once one may come; None if it grows too long."""
    matcher, tokens = compiled.matcher(), []
    mask = np.zeros((1, -(-VOCAB // 32)), np.int32)
    while len(tokens) < limit:
        matcher.fill(mask, 0)
        choices = allowed(mask)
        assert choices.max() < TOKENIZER.get_vocab_size()
        ends = [token for token in ENDS if token in choices]
        token = ends[0] if ends and rng.random() < 0.5 else int(rng.choice(choices))
        assert matcher.accept(token)
        if token in ENDS:
            assert matcher.ended
            return TOKENIZER.decode(tokens)
        tokens.append(token)
    return None


def schema(value: Any) -> Grammar:
    return Grammar(GrammarKind.JSON_SCHEMA, json.dumps(value))


@pytest.mark.parametrize("backend", BACKENDS)
def test_random_walks_under_a_schema_satisfy_it(backend: Backend) -> None:
    rng, finished = random.Random(0), 0
    for value in schemas(60, seed=1):
        text = walk(compiler(backend).compile(schema(value)), rng)
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
        Grammar(GrammarKind.CHOICE, choices=("yes", 'no "really"', "naïve 😀\n")),
        lambda text: text in ("yes", 'no "really"', "naïve 😀\n"),
    ),
    (
        Grammar(GrammarKind.EBNF, 'root ::= "<" [a-z]+ ">" | "none"'),
        lambda text: re.fullmatch("<[a-z]+>|none", text),
    ),
    (Grammar(GrammarKind.JSON_OBJECT), lambda text: isinstance(json.loads(text), dict)),
]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("grammar", "right"), OTHERS, ids=lambda value: getattr(getattr(value, "kind", ""), "value", "")
)
def test_every_kind_of_grammar_is_kept_to(grammar: Grammar, right: Any, backend: Backend) -> None:
    texts = [walk(compiler(backend).compile(grammar), random.Random(seed)) for seed in range(12)]
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
    matcher = (
        compiler("xgrammar").compile(Grammar(GrammarKind.STRUCTURAL_TAG, json.dumps(tag))).matcher()
    )
    for token in TOKENIZER.encode("free text <f>", add_special_tokens=False).ids:
        assert matcher.accept(token)
    assert not matcher.accept(TOKENIZER.encode("x", add_special_tokens=False).ids[0])
    assert matcher.accept(TOKENIZER.encode("2", add_special_tokens=False).ids[0])


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_is_accepted_can_be_taken_back_and_what_is_refused_changes_nothing(
    backend: Backend,
) -> None:
    compiled = compiler(backend).compile(
        schema({"type": "object", "properties": {"a": {"enum": ["x", "y"]}}, "required": ["a"]})
    )
    tokens = TOKENIZER.encode('{"a": "x"}', add_special_tokens=False).ids
    matcher, width = compiled.matcher(), -(-VOCAB // 32)
    masks = np.zeros((len(tokens) + 1, width), np.int32)
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
    schema({"properties": {"a": {"type": "string", "format": "color"}}}),
    schema({"type": "string", "pattern": "a", "maxLength": 3}),
    schema({"allOf": [{"type": "integer"}, {"minimum": 3}]}),
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
    schema({"minimum": 3}),
    schema({"required": ["a"]}),
    schema({"type": "object", "required": ["a"]}),
    schema({"$ref": "#/$defs/a", "minimum": 5, "$defs": {"a": {"type": "integer"}}}),
    schema({"enum": [1, 2], "minimum": 2}),
    schema({"type": "string", "enum": ["a", 1]}),
    schema({"type": "string", "minLength": 3, "format": "uuid"}),
    schema({"type": "string", "pattern": "^(?!b).*$"}),
    schema({"type": "string", "pattern": '^"$'}),
    schema({"type": "string", "pattern": "^((a{1,1000}){1,1000}){1,1000}$"}),
    schema({"type": "integer", "multipleOf": 1025}),
    schema({"type": "integer", "multipleOf": 2.5}),
    schema({"type": "integer", "multipleOf": 7, "minimum": 0}),
    schema({"type": "integer", "multipleOf": 7, "maximum": 0}),
    schema({"type": "integer", "multipleOf": 7, "minimum": 0, "maximum": 10_000}),
    schema({"type": "integer", "multipleOf": 7, "exclusiveMinimum": 0, "exclusiveMaximum": 10_002}),
    schema({"type": "array", "items": {"type": "string", "maxLength": 2**33 + 1}}),
    schema({"type": "array", "minItems": -1}),
    schema({"type": "array", "maxItems": 2.5}),
    Grammar(GrammarKind.EBNF, "root ::= root"),
    Grammar(GrammarKind.REGEX, "(["),
    Grammar(GrammarKind.EBNF, "root ::= missing"),
    Grammar(GrammarKind.EBNF, "nonsense"),
]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("grammar", BAD, ids=lambda grammar: grammar.text[:40])
def test_what_has_no_meaning_or_cannot_be_enforced_is_refused_by_name(
    grammar: Grammar, backend: Backend
) -> None:
    with pytest.raises(OutriderError) as refused:
        compiler(backend).compile(grammar)
    assert refused.value.field == f"grammar.{grammar.kind.value}"
    assert refused.value.reason.name == "INVALID_VALUE"


def test_structural_tags_are_refused_where_they_are_unknown_or_broken() -> None:
    loose = (
        '{"type": "structural_tag", "format": {"type": "json_schema", "json_schema": {"not": {}}}}'
    )
    for backend in BACKENDS:
        for text in ('{"type": "structural_tag", "format": {"type": "?"}}', loose, "["):
            with pytest.raises(OutriderError, match="structural_tag"):
                compiler(backend).compile(Grammar(GrammarKind.STRUCTURAL_TAG, text))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "bounds",
    [{}, {"minimum": 1, "maximum": 10_000}, {"exclusiveMinimum": 0, "exclusiveMaximum": 10_001}],
    ids=str,
)
def test_a_multiple_that_is_taken_is_kept_to(bounds: dict[str, int], backend: Backend) -> None:
    for multiple in (7, 1024):
        compiled = compiler(backend).compile(
            schema({"type": "integer", "multipleOf": multiple, **bounds})
        )
        for number in range(multiple, 3000, 331):
            assert takes(compiled, str(number)) == (number % multiple == 0), number


def takes(compiled: Compiled, text: str) -> bool:
    """Whether this is a whole text of the grammar."""
    matcher = compiled.matcher()
    return all(
        matcher.accept(token)
        for token in [*TOKENIZER.encode(text, add_special_tokens=False).ids, ENDS[0]]
    )


def named(count: int, **counts: int) -> Grammar:
    properties = {f"p{i}": {"type": "integer"} for i in range(count)}
    return schema({"type": "object", "properties": properties, **counts})


TOO_OFTEN = [
    Grammar(GrammarKind.REGEX, "((a{1,1000}){1,1000}){1,1000}"),
    Grammar(GrammarKind.REGEX, r"([\]{1}(]{200}){100}"),
    Grammar(GrammarKind.REGEX, "a{10001,}"),
    Grammar(GrammarKind.EBNF, 'root ::= "x"{1,100000}'),
    Grammar(GrammarKind.EBNF, 'root ::= "x"{1,4294967297}'),  # one, as XGrammar reads it
    Grammar(GrammarKind.EBNF, 'root ::= "x" {4294967299 # }\n}'),
    Grammar(GrammarKind.EBNF, 'root ::= (["(] "x"{1, 200} # )\n "}"){100}'),
    Grammar(GrammarKind.EBNF, r'root ::= Regex("(\\w{100}){1000}")'),
    Grammar(GrammarKind.EBNF, 'root ::= (Regex("x") "y"{200}){100}'),
    Grammar(GrammarKind.EBNF, 'root[capture="]"] ::= "x"{20000} "x"'),
    schema(
        {"type": "array", "items": {"type": "string", "pattern": "^((a{1,1000}){1,1000}){1,1000}$"}}
    ),
    schema({"type": "object", "patternProperties": {"^(a{200}){200}$": {}}}),
]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("grammar", TOO_OFTEN, ids=lambda grammar: grammar.text[:40])
def test_what_repeats_too_often_is_refused_with_the_limit(
    grammar: Grammar, backend: Backend
) -> None:
    with pytest.raises(
        OutriderError, match=f"grammar.{grammar.kind.value} repeats more than 10000 times"
    ):
        compiler(backend).compile(grammar)


def test_what_repeats_too_often_within_a_structural_tag_is_refused() -> None:
    often: Any = {"type": "const_string", "value": "a"}
    for _ in range(3):
        often = {
            "type": "sequence",
            "elements": [{"type": "repeat", "min": 1, "max": 100, "content": often}],
        }
    for part in (
        {"type": "regex", "pattern": "(a{900}){90}"},
        {"type": "grammar", "grammar": "root ::= [a]{99999}"},
        often,
    ):
        tag = json.dumps({"type": "structural_tag", "format": part})
        with pytest.raises(OutriderError, match="structural_tag repeats more than 10000 times"):
            compiler("xgrammar").compile(Grammar(GrammarKind.STRUCTURAL_TAG, tag))


@pytest.mark.parametrize(
    "grammar",
    [named(101, maxProperties=20_000), named(200, maxProperties=51), named(101, minProperties=1)],
)
def test_more_properties_than_can_be_counted_are_refused(grammar: Grammar) -> None:
    for backend in BACKENDS:
        with pytest.raises(OutriderError, match="properties beside minProperties or maxProperties"):
            compiler(backend).compile(grammar)


FINE = [
    Grammar(GrammarKind.REGEX, "[0-9]{1,50}-[a-z]{1,50}-(a|b){1,50}-x{500}"),
    Grammar(GrammarKind.REGEX, "(ab{2}){3}"),
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


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("grammar", FINE, ids=lambda grammar: grammar.text[:40])
def test_what_repeats_but_bearably_is_taken(grammar: Grammar, backend: Backend) -> None:
    compiler(backend).compile(grammar)


@pytest.mark.parametrize(
    "text", ["[", "{", '"', "(", "\\p{", "a[a", 'a["', "Regex(", "{#", "a[a\n"]
)
def test_reading_counts_takes_time_in_proportion_to_the_text(text: str) -> None:
    started = time.thread_time()
    for check in (check_pattern, check_ebnf):
        check((text * 65_536)[:65_536], "field")
    assert time.thread_time() - started < 2


def test_a_grammar_that_can_be_read_in_too_many_ways_is_refused_before_a_batch_has_to_wait_for_its_masks() -> (
    None
):
    # Up to 1024 letters, and for each half of each part a choice whether it is there.
    rules = [f"r{i} ::= r{i + 1}? r{i + 1}" for i in range(10)]
    grammar = Grammar(GrammarKind.EBNF, "\n".join(["root ::= r0", *rules, "r10 ::= [a-z]"]))
    with pytest.raises(
        OutriderError,
        match=r"grammar\.ebnf can be read in too many ways: masks .* longer than 50 ms each",
    ):
        compiler("xgrammar").compile(grammar)


@pytest.mark.parametrize("backend", BACKENDS)
def test_large_grammars_whose_masks_are_quick_are_taken(backend: Backend) -> None:
    record = {
        "type": "object",
        "properties": {"id": {"type": "integer"}, "name": {"type": "string", "maxLength": 100}},
    }
    compiler(backend).compile(schema({"type": "array", "maxItems": 1000, "items": record}))
    compiler(backend).compile(schema({"type": "string", "maxLength": 10_000}))
    compiler(backend).compile(Grammar(GrammarKind.REGEX, "[a-z]{1,1000}"))


def references(links: int) -> Grammar:
    parts = {str(i): {"type": "array", "items": {"$ref": f"#/$defs/{i + 1}"}} for i in range(links)}
    whole = {"$ref": "#/$defs/0", "$defs": {**parts, str(links): {}}}
    return Grammar(GrammarKind.JSON_SCHEMA, json.dumps(whole, separators=(",", ":")))


def aliases(links: int) -> Grammar:
    return Grammar(
        GrammarKind.EBNF,
        "root::=a0\n" + "\n".join(f"a{i}::=a{i + 1}" for i in range(links)) + f'\na{links}::="["',
    )


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "grammar", [references(1200), aliases(4700)], ids=["references", "aliases"]
)
def test_a_chain_as_long_as_a_grammar_may_be_does_not_end_the_process(
    grammar: Grammar, backend: Backend
) -> None:
    """On a thread with a stack of its own; the masks then need no more than any thread has."""
    assert 0.95 * MAX_GRAMMAR_CHARACTERS < len(grammar.text) <= MAX_GRAMMAR_CHARACTERS
    matcher, mask = (
        compiler(backend).compile(grammar).matcher(),
        np.zeros((1, -(-VOCAB // 32)), np.int32),
    )
    matcher.fill(mask, 0)
    bracket = TOKENIZER.token_to_id("[")
    assert bracket in allowed(mask)
    assert matcher.accept(bracket)
    matcher.fill(mask, 0)


def test_only_the_threads_that_compile_have_the_large_stack() -> None:
    before = threading.stack_size()
    GrammarCompiler(TARGET, VOCAB, ENDS)
    assert threading.stack_size() == before


def test_what_was_compiled_is_remembered_within_a_number_of_bytes() -> None:
    own = GrammarCompiler(TARGET, VOCAB, ENDS, cache_bytes=100_000)
    first, second = (Grammar(GrammarKind.REGEX, text) for text in ("first", "second"))
    compiled = own.compile(first)
    own.compile(second)
    for i in range(50):
        own.compile(Grammar(GrammarKind.REGEX, f"a{i}"))
        assert own.compile(first) is compiled  # asked for again and again, unlike the second
        assert 0 < own.cache.size_bytes <= 100_000
    assert own.cache.get(second) is None


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_larger_grammar_counts_for_more(backend: Backend) -> None:
    sizes = [
        compiler(backend).compile(Grammar(GrammarKind.REGEX, "ab[c-e]" * n)).size_bytes
        for n in (1, 100, 1000)
    ]
    assert sizes[0] < sizes[1] < sizes[2]
    assert sizes[2] > 100_000


def test_a_grammar_beyond_the_cache_leaves_the_others_in_it() -> None:
    class Large:
        size_bytes = 2_000_000

        def matcher(self) -> Matcher:
            raise NotImplementedError

    cache, small = (
        GrammarCache(1_000_000),
        compiler("xgrammar").compile(Grammar(GrammarKind.REGEX, "small")),
    )
    cache.add(Grammar(GrammarKind.REGEX, "small"), small)
    assert cache.add(Grammar(GrammarKind.REGEX, "large"), large := Large()) is large
    assert cache.get(Grammar(GrammarKind.REGEX, "large")) is None
    assert cache.get(Grammar(GrammarKind.REGEX, "small")) is small


async def test_what_waits_for_the_same_grammar_gets_it_compiled_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own, times = GrammarCompiler(TARGET, VOCAB, ENDS), 0
    monkeypatch.setattr(grammar_module, "_COMPILING", 1)
    own._pool, real = grammar_module._threads(), own._backend.compile

    def count(grammar: Grammar) -> Compiled:
        nonlocal times
        times += 1
        return real(grammar)

    monkeypatch.setattr(own._backend, "compile", count)
    same = Grammar(GrammarKind.REGEX, "same")
    found = await asyncio.gather(*(own.compile_async(same) for _ in range(4)))
    assert [*found, await own.compile_async(same), own.compile(same)] == [found[0]] * 6
    assert times == 1


async def test_a_slow_grammar_is_cut_off_while_others_compile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own = GrammarCompiler(TARGET, VOCAB, ENDS, compile_seconds=1.0)
    release, real = threading.Event(), own._backend.compile

    def compile_slowly(grammar: Grammar) -> Compiled:
        if grammar.text == "slow":
            release.wait(10)
        return real(grammar)

    monkeypatch.setattr(own._backend, "compile", compile_slowly)
    slow = asyncio.create_task(own.compile_async(Grammar(GrammarKind.REGEX, "slow")))
    await asyncio.sleep(0)
    assert await own.compile_async(Grammar(GrammarKind.REGEX, "fast"))
    with pytest.raises(OutriderError, match="than 1 s"):
        await slow
    release.set()


class Held:
    """A backend's `compile` that ends when it is let go; what it was asked for."""

    def __init__(self, own: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun: list[str] = []
        self.release = threading.Event()
        self._real = own._backend.compile
        own._pool = grammar_module._threads()
        self.thread_count = own._pool._max_workers
        monkeypatch.setattr(own._backend, "compile", self._compile)

    def _compile(self, grammar: Grammar) -> Compiled:
        self.begun.append(grammar.text)
        self.release.wait(10)
        return self._real(grammar)


async def test_a_grammar_that_others_kept_from_being_begun_may_come_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own = GrammarCompiler(TARGET, VOCAB, ENDS, compile_seconds=0.3)
    held = Held(own, monkeypatch)
    asked = [Grammar(GrammarKind.REGEX, f"a{i}") for i in range(held.thread_count + 3)]
    failures = await asyncio.gather(
        *(own.compile_async(grammar) for grammar in asked), return_exceptions=True
    )
    reasons = [failure.reason for failure in failures if isinstance(failure, OutriderError)]
    assert reasons == [Reason.INVALID_VALUE] * held.thread_count + [Reason.OVERLOADED] * 3
    held.release.set()
    own._pool.shutdown()
    assert held.begun == [grammar.text for grammar in asked[: held.thread_count]]


async def test_what_a_client_that_went_away_asked_for_is_not_begun(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own = GrammarCompiler(TARGET, VOCAB, ENDS, compile_seconds=60.0)
    held = Held(own, monkeypatch)
    texts = [*(f"a{i}" for i in range(held.thread_count)), "gone", "stays"]
    running = {
        text: asyncio.create_task(own.compile_async(Grammar(GrammarKind.REGEX, text)))
        for text in texts
    }
    await asyncio.sleep(0)
    gone = running.pop("gone")
    gone.cancel()
    await asyncio.wait({gone})
    held.release.set()
    await asyncio.gather(*running.values())
    own._pool.shutdown()
    assert sorted(held.begun) == sorted(set(texts) - {"gone"})
