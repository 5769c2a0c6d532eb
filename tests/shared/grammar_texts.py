"""Compiles grammars for the bundled target's tokenizer, and writes random texts under them."""

from __future__ import annotations

import json
import queue
import random
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from outrider.grammar.backends import Compiled
from outrider.grammar.compiler import GrammarCompiler
from outrider.grammar.kinds import Grammar, GrammarKind
from outrider.grammar.worker import checker
from outrider.tokenizer import load_tokenizer

TARGET = str(Path(__file__).parents[2] / "models/target")
# Masks cover more ids than the tokenizer has, as models' logits often do.
VOCAB = 4100
ENDS = (0, 3)
TOKENIZER = load_tokenizer(TARGET)


class _Here:
    """Checks grammars as a worker process does, in the tests' process, which has torch already."""

    def __init__(self) -> None:
        self._check = checker(TARGET, VOCAB, list(ENDS))

    def call(self, request: bytes, seconds: float) -> bytes:
        """Answer as `Worker.call` does, but without the time limit."""
        return self._check(request)


@cache
def compiler() -> GrammarCompiler:
    """Return a compiler that all tests share.

    Each worker process would take seconds to load torch. test_grammar_compiler.py and the longest
    grammars of test_grammar_limits.py have real workers.
    """
    made = GrammarCompiler(TARGET, VOCAB, ENDS, trusted=True)
    made._workers = queue.SimpleQueue()
    made._workers.put(_Here())
    return made


def allowed(mask: np.ndarray, row: int = 0) -> np.ndarray:
    """Return the token ids that a row of a mask allows."""
    bits = np.unpackbits(mask[row].view(np.uint8), bitorder="little")
    return np.flatnonzero(bits[:VOCAB])


def walk(compiled: Compiled, rng: random.Random, limit: int = 400) -> str | None:
    """Return a text of random allowed tokens; None if it grows beyond `limit` tokens.

    Where the grammar allows an end token, the walk takes it with probability 1/2.
    """
    matcher = compiled.matcher()
    tokens: list[int] = []
    mask = np.zeros((1, -(-VOCAB // 32)), np.int32)
    while len(tokens) < limit:
        matcher.fill(mask, 0)
        choices = allowed(mask)
        assert choices.max() < TOKENIZER.get_vocab_size()
        ends = [token for token in ENDS if token in choices]
        token = int(rng.choice(choices))
        if ends and rng.random() < 0.5:
            token = ends[0]
        assert matcher.accept(token)
        if token in ENDS:
            assert matcher.ended
            return TOKENIZER.decode(tokens)
        tokens.append(token)
    return None


def schema(value: Any) -> Grammar:
    """Return the grammar of a JSON schema."""
    return Grammar(GrammarKind.JSON_SCHEMA, json.dumps(value))


def in_tag(grammar: Grammar) -> Grammar:
    """Return a structural tag for the grammar's texts."""
    if grammar.kind is GrammarKind.EBNF:
        return grammar
    if grammar.kind is GrammarKind.JSON_SCHEMA:
        # The grammar's text is not always JSON.
        part = f'{{"type":"json_schema","json_schema":{grammar.text}}}'
    else:
        part = json.dumps(_part(grammar))
    text = f'{{"type":"structural_tag","format":{part}}}'
    return Grammar(GrammarKind.STRUCTURAL_TAG, text)


def _part(grammar: Grammar) -> dict[str, Any]:
    match grammar.kind:
        case GrammarKind.JSON_OBJECT:
            return {"type": "json_schema", "json_schema": {"type": "object"}}
        case GrammarKind.REGEX:
            return {"type": "regex", "pattern": grammar.text}
    texts = [{"type": "const_string", "value": choice} for choice in grammar.choices]
    return {"type": "or", "elements": texts}


def itself(grammar: Grammar) -> Grammar:
    """Return the grammar unchanged."""
    return grammar


Way = Callable[[Grammar], Grammar]
WAYS: tuple[Way, ...] = (itself, in_tag)
"""Ways in which a request may ask for a grammar's texts. GBNF does not fit into a tag."""


def takes(compiled: Compiled, text: str) -> bool:
    """True if the grammar allows this text and nothing after it."""
    matcher = compiled.matcher()
    tokens = TOKENIZER.encode(text, add_special_tokens=False).ids
    return all(matcher.accept(token) for token in [*tokens, ENDS[0]])
