"""A grammar allows the tokens that the gateway reads as its text, with every kind of tokenizer."""

from __future__ import annotations

import json

import llguidance
import llguidance.numpy
import numpy as np
import pytest

from gateway.text.token_table import TokenTable
from outrider.grammar.tokens import bytes_of, for_llguidance
from tests.gateway.tokenizer_kinds import KINDS, tokenizer

CHOICES = [["the"], [" the"], ["the", "not known"], [" two  spaces", "日本"], ["naïve", " is"]]


@pytest.mark.parametrize("kind", KINDS)
def test_a_tokens_bytes_are_those_of_its_text(kind: str) -> None:
    made = tokenizer(kind)
    count = made.get_vocab_size()
    table = TokenTable(made)
    found = bytes_of(for_llguidance(made, count, ()), made, count)
    for token in range(count):
        if not table.is_special(token):
            assert found[token] == table.text_and_bytes(token)[1], made.id_to_token(token)


@pytest.mark.parametrize("choices", CHOICES, ids=" or ".join)
@pytest.mark.parametrize("kind", KINDS)
def test_every_token_that_a_choice_allows_leads_to_the_choice(
    kind: str, choices: list[str]
) -> None:
    made = tokenizer(kind)
    count = made.get_vocab_size()
    loaded = for_llguidance(made, count, ())
    lark = "start: " + " | ".join(json.dumps(choice, ensure_ascii=False) for choice in choices)
    grammar = llguidance.LLMatcher.grammar_from_lark(lark)
    whole = [choice.encode() for choice in choices]
    mask = llguidance.numpy.allocate_token_bitmask(1, count)
    texts = {b"": llguidance.LLMatcher(loaded, grammar)}
    while texts:
        text, matcher = texts.popitem()
        if text in whole:
            continue
        llguidance.numpy.fill_next_token_bitmask(matcher, mask, 0)
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
        assert len(allowed), text
        for token in allowed.tolist():
            copy = matcher.deep_copy()
            assert copy.consume_token(token)
            after = text + loaded.decode_bytes([token])
            assert any(choice.startswith(after) for choice in whole)
            texts[after] = copy
