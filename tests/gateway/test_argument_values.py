"""The reader turns every text that a call's grammar allows into a value that the schema accepts."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import given, reject
from hypothesis import strategies as st

from gateway.tools.definitions import Tool, ToolUse
from gateway.tools.formats import FORMATS, ToolFormat
from gateway.tools.grammar import calls_grammar
from gateway.tools.reader import AnswerReader, CallArguments, CallBegin, Content, Part, Reading
from outrider.errors import OutriderError
from outrider.grammar.backends import Compiled, Libraries, MaskLimit, TextMatcher
from outrider.grammar.trial import Trial, compile_only
from tests.gateway.gateway_rig import TARGET
from tests.hostile_messages import fuzzing

EOS = 0
VOCAB = 4096
# One format of each style, and two more formats because their layouts differ.
STYLES = (
    *("qwen_3", "qwen_3_coder", "mimo", "glm_4_7", "minimax", "gemma_4"),
    *("deepseek_v3_2", "deepseek_v4_1"),
)
BY_STYLE = pytest.mark.parametrize("name", STYLES)

TEXTS = ["a", "42", "true", "null", "None", " x", "x\n", "", "{", '"q"', "5.0", "日本", "[1]"]
DEFINITIONS = {
    "Name": {"type": "string"},
    "Count": {"type": "integer", "minimum": 2},
    "Point": {
        "type": "object",
        "properties": {"x": {"type": "integer"}, "next": {"$ref": "#/$defs/Point"}},
        "required": ["x"],
        "additionalProperties": False,
    },
    "Size": {"enum": ["1", "2", "big"]},
    "Alias": {"$ref": "#/$defs/Name"},
}
SIMPLE: list[Any] = [
    {"type": "string"},
    {"type": "string", "maxLength": 3},
    {"type": "string", "minLength": 2},
    {"type": "string", "pattern": "^[a-z0-9 ]{2,5}$"},
    {"type": "string", "format": "date"},
    {"const": "v 1"},
    {"type": "integer"},
    {"type": "integer", "minimum": -5, "maximum": 40},
    {"type": "number"},
    {"type": "boolean"},
    {"type": "null"},
    {"type": ["string", "null"]},
    {"type": ["string", "integer", "boolean"]},
    {"enum": [1, "1", None, True, "x"]},
    {"enum": [{"a": 1}, [2], "x", 3]},
    {"enum": [1, "1", None, "xy", 7], "type": ["string", "integer"], "minimum": 3, "minLength": 2},
    {"enum": ["a", "42", "0", "yes"], "pattern": "^[a-z]+$"},
    {"allOf": [{"type": "integer", "minimum": 5}, {"minimum": 3, "maximum": 8}]},
    {"allOf": [{"multipleOf": 4}, {"type": "integer", "multipleOf": 6}]},
    {"type": "integer", "minimum": 5, "anyOf": [{"maximum": 3}, {"maximum": 9}]},
    {"enum": [1.5, 2.0, 3, "x"], "type": ["integer", "string"]},
    {"type": "array", "prefixItems": [{"type": "integer"}] * 2, "items": False, "maxItems": 1},
    {"type": "array", "items": {"enum": ["a"], "maxLength": 0}},
    {
        "type": "array",
        "allOf": [
            {"prefixItems": [{"enum": [1, "a"]}], "items": {"type": "integer"}, "maxItems": 3},
            {"minItems": 2},
            {"minItems": 1, "maxItems": 4},
        ],
    },
    {},
    {"description": "anything"},
    *({"$ref": f"#/$defs/{name}"} for name in DEFINITIONS),
]


def values() -> st.SearchStrategy[Any]:
    """Return schemas of one argument."""
    texts = st.lists(st.sampled_from(TEXTS), min_size=1, max_size=3, unique=True)
    simple = st.sampled_from(SIMPLE) | texts.map(lambda found: {"enum": found})

    def wider(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        several = st.lists(inner, min_size=2, max_size=3)
        return st.one_of(
            inner.map(lambda each: {"type": "array", "items": each, "maxItems": 2}),
            inner.map(lambda each: {"anyOf": [each, {"type": "null"}]}),
            inner.map(lambda each: {"allOf": [each]}),
            several.map(lambda each: {"anyOf": each}),
            several.map(lambda each: {"allOf": each}),
            inner.map(
                lambda each: {
                    "type": "object",
                    "properties": {"k": each},
                    "additionalProperties": False,
                }
            ),
        )

    return st.recursive(simple, wider, max_leaves=4)


@st.composite
def schemas(draw: st.DrawFn) -> dict[str, Any]:
    """Return schemas of all arguments of a call."""
    names = draw(st.lists(st.sampled_from("abcd"), max_size=3, unique=True))
    made: dict[str, Any] = {
        "type": "object",
        "properties": {name: draw(values()) for name in names},
        "required": draw(st.lists(st.sampled_from(names), unique=True)) if names else [],
        "additionalProperties": draw(st.sampled_from([False, False, True, {"type": "integer"}])),
    }
    match draw(st.integers(0, 5)):
        case 0:
            other = {**made, "properties": {"e": draw(values())}, "required": ["e"]}
            made = {"anyOf": [made, other]}
        case 1:
            return {"$ref": "#/$defs/All", "$defs": {**DEFINITIONS, "All": made}}
    return {**made, "$defs": DEFINITIONS}


@pytest.fixture(scope="module")
def libraries() -> Libraries:
    return Libraries(TARGET, VOCAB, (EOS,))


def compiled(libraries: Libraries, form: ToolFormat, schema: Any) -> Compiled:
    use = ToolUse([Tool("f", schema, strict=True)], is_forced=True, is_parallel=False)
    trial = Trial(libraries, VOCAB, (EOS,))
    return compile_only(libraries, trial.translated(calls_grammar(form, use, None, "over")))


class Writer:
    """Writes random complete texts of a grammar, with pieces that a reader may misread."""

    def __init__(self, libraries: Libraries, form: ToolFormat, rng: random.Random) -> None:
        self._bytes = libraries.token_bytes
        self._rng = rng
        ends = [text for text in form.literals if "{" not in text]
        self._ends = [*ends, *(f"\n{text}" for text in ends), '"', "}", "]", "{}", "[]"]
        self._more = [*TEXTS, *ends, " ", "\n", '"', "{", "[", "-", "1e5", "\\"]

    def text(self, matcher: TextMatcher, most: int = 120) -> str | None:
        """Return a text up to its end; None if it does not end soon or a mask takes too long."""
        mask = np.zeros((1, VOCAB // 32), np.int32)
        found = b""
        for position in range(most):
            try:
                matcher.fill(mask, 0)
            except MaskLimit:
                return None
            allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
            if EOS in allowed:
                return found.decode()
            if (snippet := self._snippet(matcher, position)) is not None:
                found += snippet
                continue
            token = int(self._rng.choice(allowed))
            assert matcher.accept(token)
            found += self._bytes[token]
        return None

    def _snippet(self, matcher: TextMatcher, position: int) -> bytes | None:
        """Return one of the listed texts that the grammar allows, or None."""
        choices = self._ends if self._rng.random() < position / 40 else self._more
        for text in self._rng.sample(choices, min(6, len(choices))):
            if text and self._rng.random() < 0.7 and matcher.accept_bytes(text.encode()):
                return text.encode()
        return None


def arguments_of(form: ToolFormat, schema: Any, text: str, cuts: list[int]) -> str:
    """Return the arguments of the text's only call, read in pieces."""
    reader = AnswerReader(Reading(form, {"f": schema}, is_forced=True))
    parts: list[Part] = []
    for begin, end in zip([0, *cuts], [*cuts, len(text)], strict=True):
        parts += reader.push(text[begin:end])
    parts += reader.finish()
    assert not any(isinstance(part, Content) for part in parts), text
    assert sum(isinstance(part, CallBegin) for part in parts) == 1, text
    return "".join(part.text for part in parts if isinstance(part, CallArguments))


def check(libraries: Libraries, form: ToolFormat, schema: Any, rng: random.Random) -> int:
    """Read texts of a schema's grammar back; return how many ended."""
    found = compiled(libraries, form, schema)
    ended = 0
    for _ in range(4):
        text = Writer(libraries, form, rng).text(found.matcher())
        if text is None:
            continue
        ended += 1
        for count in (0, 3, len(text) - 1):
            cuts = sorted(rng.sample(range(1, len(text)), min(count, len(text) - 1)))
            arguments = arguments_of(form, schema, text, cuts)
            jsonschema.validate(json.loads(arguments), schema)
    return ended


@BY_STYLE
@fuzzing(8)
@given(schema=schemas(), seed=st.integers(0, 2**32))
def test_what_the_grammar_allows_comes_back_as_a_value_of_the_schema(
    libraries: Libraries, name: str, schema: dict[str, Any], seed: int
) -> None:
    try:
        check(libraries, FORMATS[name], schema, random.Random(seed))
    except OutriderError:
        reject()
