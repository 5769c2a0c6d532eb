"""Schemas of the public JSON-Schema-Test-Suite and of everyday use are enforced or clearly refused.

The error of a clear refusal names the request's field.

tests/install-tools.sh takes the suite from jsonschema's source package. The tests play a fixed
sample. `python -m tests.grammar.test_schema_suite` plays everything and prints a table. With two
numbers, it plays one of several parts, counted from 0: `… 8 3` plays part 3 of 8.
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from outrider.errors import OutriderError, Reason
from outrider.grammar.compiler import GrammarCompiler
from outrider.grammar.guard import DeadEnd, Walker, check_of
from tests.grammar.everyday import EVERYDAY, grammar_for

ROOT = Path(__file__).parents[2]
SUITE = ROOT / "build/json-schema-suite"
TARGET = str(ROOT / "models/target")
# Masks cover more ids than the tokenizer has, as models' logits often do.
VOCAB = 4100
ENDS = (0, 3)
# The number of random texts of each schema: in the tests, and in the whole table.
TEST_TEXTS = 60
TEXTS = 200
# The test of a schema's texts also ends after this processor time.
SECONDS = 10.0
SAMPLE = 50
DRAFTS = {
    "draft4": "http://json-schema.org/draft-04/schema#",
    "draft6": "http://json-schema.org/draft-06/schema#",
    "draft7": "http://json-schema.org/draft-07/schema#",
    "draft2019-09": "https://json-schema.org/draft/2019-09/schema",
    "draft2020-12": "https://json-schema.org/draft/2020-12/schema",
}


def suite() -> list[tuple[str, Any]]:
    """Return each named schema of the suite; an object without `$schema` gets its folder's."""
    return [
        (f"{path.relative_to(SUITE / 'tests')}: {group['description']}", value)
        for draft, version in DRAFTS.items()
        for path in sorted((SUITE / "tests" / draft).rglob("*.json"))
        for group in json.loads(path.read_text())
        for value in [_versioned(group["schema"], version)]
    ]


def _versioned(value: Any, version: str) -> Any:
    return {"$schema": version, **value} if isinstance(value, dict) else value


@cache
def compiler() -> GrammarCompiler:
    """Return a compiler with a long time limit: a loaded machine would exceed the usual limit."""
    return GrammarCompiler(TARGET, VOCAB, ENDS, compile_seconds=60.0)


@cache
def walker() -> Walker:
    """Return a walker that writes texts of the bundled target's tokens."""
    return Walker(compiler()._libraries.token_bytes, ENDS)


def outcome(value: Any, texts: int = TEXTS) -> tuple[str, str]:
    """Return a schema's outcome, "enforced", "refused" or "wrong", and a message or text."""
    grammar = grammar_for(value)
    try:
        compiled = compiler().compile(grammar)
    except OutriderError as error:
        clear = error.reason is Reason.INVALID_VALUE and error.field == grammar.field
        return ("refused" if clear else "wrong"), error.message
    is_right = check_of(grammar)
    assert is_right is not None
    deadline = time.thread_time() + SECONDS
    for seed in range(texts):
        try:
            text = walker().text(compiled, random.Random(seed), deadline)
        except DeadEnd as cause:
            return "wrong", f"nothing follows {cause.text!r}"
        if text is not None and not is_right(text):
            return "wrong", repr(text)
    return "enforced", ""


@pytest.mark.slow
def test_no_text_of_the_public_suites_schemas_is_wrong() -> None:
    if not SUITE.is_dir():
        pytest.skip("tests/install-tools.sh has not downloaded the JSON-Schema-Test-Suite")
    _check(random.Random(0).sample(suite(), SAMPLE))


@pytest.mark.slow
def test_no_text_of_everyday_schemas_is_wrong() -> None:
    bounded = {"strings of bounded length": {"type": "string", "minLength": 1, "maxLength": 9}}
    _check(list((EVERYDAY | bounded).items()))


def _check(named: list[tuple[str, Any]]) -> None:
    found = [(name, *outcome(value, TEST_TEXTS)) for name, value in named]
    assert [each for each in found if each[1] == "wrong"] == []
    assert any(each[1] == "enforced" for each in found)


def _print_table(parts: int = 1, part: int = 0) -> None:
    named = [("suite", *each) for each in suite()] + [
        ("everyday", *each) for each in EVERYDAY.items()
    ]
    counts: Counter[tuple[str, str]] = Counter()
    for title, name, value in named[part::parts]:
        kind, message = outcome(value)
        counts[title, kind] += 1
        if kind == "wrong":
            print(f"wrong: {name}: {message}", flush=True)
    for (title, kind), count in sorted(counts.items()):
        print(f"{title}, {kind}: {count}", flush=True)


if __name__ == "__main__":
    _print_table(*map(int, sys.argv[1:]))
