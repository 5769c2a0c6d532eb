"""Grammars: what the mask allows is what the grammar means, with either backend; what has no meaning is refused by name."""

from __future__ import annotations

import asyncio
import json
import random
import re
import threading
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from json_schemas import schemas

from outrider import grammar as grammar_module
from outrider.errors import OutriderError
from outrider.grammar import GrammarCompiler
from outrider.grammar_backends import Backend, Compiled, Matcher
from outrider.grammar_cache import GrammarCache
from outrider.messages import MAX_GRAMMAR_CHARACTERS, Grammar, GrammarKind
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
    (Grammar(GrammarKind.REGEX, "[a-f]{2,5}-[0-9]+"), lambda text: re.fullmatch("[a-f]{2,5}-[0-9]+", text)),
    (
        Grammar(GrammarKind.CHOICE, choices=("yes", 'no "really"', "naïve 😀\n")),
        lambda text: text in ("yes", 'no "really"', "naïve 😀\n"),
    ),
    (Grammar(GrammarKind.EBNF, 'root ::= "<" [a-z]+ ">" | "none"'), lambda text: re.fullmatch("<[a-z]+>|none", text)),
    (Grammar(GrammarKind.JSON_OBJECT), lambda text: isinstance(json.loads(text), dict)),
]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("grammar", "right"), OTHERS, ids=lambda value: getattr(getattr(value, "kind", ""), "value", ""))
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
            "tags": [{"begin": "<f>", "content": {"type": "json_schema", "json_schema": {"enum": [1, 2]}}, "end": "</f>"}],
        },
    }
    matcher = compiler("xgrammar").compile(Grammar(GrammarKind.STRUCTURAL_TAG, json.dumps(tag))).matcher()
    for token in TOKENIZER.encode("free text <f>", add_special_tokens=False).ids:
        assert matcher.accept(token)
    assert not matcher.accept(TOKENIZER.encode("x", add_special_tokens=False).ids[0])
    assert matcher.accept(TOKENIZER.encode("2", add_special_tokens=False).ids[0])


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_is_accepted_can_be_taken_back_and_what_is_refused_changes_nothing(backend: Backend) -> None:
    compiled = compiler(backend).compile(schema({"type": "object", "properties": {"a": {"enum": ["x", "y"]}}, "required": ["a"]}))
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
    Grammar(GrammarKind.REGEX, "((a{1,1000}){1,1000}){1,1000}"),
    Grammar(GrammarKind.EBNF, "root ::= root"),
    Grammar(GrammarKind.REGEX, "(["),
    Grammar(GrammarKind.EBNF, "root ::= missing"),
    Grammar(GrammarKind.EBNF, "nonsense"),
]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("grammar", BAD, ids=lambda grammar: grammar.text[:40])
def test_what_has_no_meaning_or_cannot_be_enforced_is_refused_by_name(grammar: Grammar, backend: Backend) -> None:
    with pytest.raises(OutriderError) as refused:
        compiler(backend).compile(grammar)
    assert refused.value.field == f"grammar.{grammar.kind.value}"
    assert refused.value.reason.name == "INVALID_VALUE"


def test_structural_tags_are_refused_where_they_are_unknown_or_broken() -> None:
    loose = '{"type": "structural_tag", "format": {"type": "json_schema", "json_schema": {"not": {}}}}'
    for backend in BACKENDS:
        for text in ('{"type": "structural_tag", "format": {"type": "?"}}', loose, "["):
            with pytest.raises(OutriderError, match="structural_tag"):
                compiler(backend).compile(Grammar(GrammarKind.STRUCTURAL_TAG, text))


def test_repetition_is_bounded_where_it_nests_and_not_where_it_follows_itself() -> None:
    for fine in ("[0-9]{1,50}-[a-z]{1,50}-(a|b){1,50}-x{500}", "(ab{2}){3}"):
        compiler("xgrammar").compile(Grammar(GrammarKind.REGEX, fine))


def test_a_grammar_that_can_be_read_in_too_many_ways_is_refused_before_a_batch_has_to_wait_for_its_masks() -> None:
    # Up to 1024 letters, and for each half of each part a choice whether it is there.
    rules = [f"r{i} ::= r{i + 1}? r{i + 1}" for i in range(10)]
    grammar = Grammar(GrammarKind.EBNF, "\n".join(["root ::= r0", *rules, "r10 ::= [a-z]"]))
    with pytest.raises(OutriderError, match=r"grammar\.ebnf can be read in too many ways: masks .* longer than 50 ms each"):
        compiler("xgrammar").compile(grammar)


@pytest.mark.parametrize("backend", BACKENDS)
def test_large_grammars_whose_masks_are_quick_are_taken(backend: Backend) -> None:
    record = {"type": "object", "properties": {"id": {"type": "integer"}, "name": {"type": "string", "maxLength": 100}}}
    compiler(backend).compile(schema({"type": "array", "maxItems": 1000, "items": record}))
    compiler(backend).compile(schema({"type": "string", "maxLength": 10_000}))
    compiler(backend).compile(Grammar(GrammarKind.REGEX, "[a-z]{1,1000}"))


def references(links: int) -> Grammar:
    parts = {str(i): {"type": "array", "items": {"$ref": f"#/$defs/{i + 1}"}} for i in range(links)}
    whole = {"$ref": "#/$defs/0", "$defs": {**parts, str(links): {}}}
    return Grammar(GrammarKind.JSON_SCHEMA, json.dumps(whole, separators=(",", ":")))


def aliases(links: int) -> Grammar:
    return Grammar(GrammarKind.EBNF, "root::=a0\n" + "\n".join(f"a{i}::=a{i + 1}" for i in range(links)) + f'\na{links}::="["')


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("grammar", [references(1200), aliases(4700)], ids=["references", "aliases"])
def test_a_chain_as_long_as_a_grammar_may_be_does_not_end_the_process(grammar: Grammar, backend: Backend) -> None:
    """On a thread with a stack of its own; the masks then need no more than any thread has."""
    assert 0.95 * MAX_GRAMMAR_CHARACTERS < len(grammar.text) <= MAX_GRAMMAR_CHARACTERS
    matcher, mask = compiler(backend).compile(grammar).matcher(), np.zeros((1, -(-VOCAB // 32)), np.int32)
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
    sizes = [compiler(backend).compile(Grammar(GrammarKind.REGEX, "ab[c-e]" * n)).size_bytes for n in (1, 100, 1000)]
    assert sizes[0] < sizes[1] < sizes[2]
    assert sizes[2] > 100_000


def test_a_grammar_beyond_the_cache_leaves_the_others_in_it() -> None:
    class Large:
        size_bytes = 2_000_000

        def matcher(self) -> Matcher:
            raise NotImplementedError

    cache, small = GrammarCache(1_000_000), compiler("xgrammar").compile(Grammar(GrammarKind.REGEX, "small"))
    cache.add(Grammar(GrammarKind.REGEX, "small"), small)
    assert cache.add(Grammar(GrammarKind.REGEX, "large"), large := Large()) is large
    assert cache.get(Grammar(GrammarKind.REGEX, "large")) is None
    assert cache.get(Grammar(GrammarKind.REGEX, "small")) is small


async def test_what_waits_for_the_same_grammar_gets_it_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
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


async def test_a_slow_grammar_is_cut_off_while_others_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    own = GrammarCompiler(TARGET, VOCAB, ENDS, compile_seconds=0.3)
    release, real = threading.Event(), own._backend.compile

    def compile_slowly(grammar: Grammar) -> Compiled:
        if grammar.text == "slow":
            release.wait(10)
        return real(grammar)

    monkeypatch.setattr(own._backend, "compile", compile_slowly)
    slow = asyncio.create_task(own.compile_async(Grammar(GrammarKind.REGEX, "slow")))
    await asyncio.sleep(0)
    assert await own.compile_async(Grammar(GrammarKind.REGEX, "fast"))
    with pytest.raises(OutriderError, match=r"0\.3 s"):
        await slow
    release.set()
