"""A matcher tells which bytes must follow a text. A copy of it reads further bytes by itself."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from outrider.grammar.backends import TextMatcher
from outrider.grammar.compiler import GrammarCompiler
from tests.grammar.everyday import grammar_for

END = 3
SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}, "städte": {"enum": ["Köln", "Bonn"]}},
    "required": ["ok", "städte"],
    "additionalProperties": False,
}


Begin = Callable[..., TextMatcher]


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return GrammarCompiler("models/target", 4096, (0, END), trusted=True)


@pytest.fixture
def matcher(compiler: GrammarCompiler) -> Begin:
    """Return a function that makes a matcher of the schema, which has read the given text."""

    def begin(text: str = "") -> TextMatcher:
        found = compiler.compile(grammar_for(SCHEMA)).matcher()
        assert not text or found.accept_bytes(text.encode())
        return found

    return begin


@pytest.mark.parametrize(
    ("text", "forced"),
    [
        ("", "{"),
        ("{", ""),
        ('{"', 'ok"'),
        ('{"ok": t', "rue"),
        ('{"ok": true, "', 'städte"'),
        ('{"ok": true, "städte": "K', 'öln"'),
        ('{"ok": true, "städte": "Köln"', ""),
    ],
)
def test_what_must_follow_ends_at_the_next_choice(matcher: Begin, text: str, forced: str) -> None:
    assert matcher(text).jump_forward().decode() == forced


def test_bytes_that_a_grammar_forbids_change_nothing(matcher: Begin) -> None:
    found = matcher('{"o')
    assert not found.accept_bytes(b'k": 7')
    assert found.jump_forward() == b'k"'


def test_a_copy_goes_its_own_way(matcher: Begin) -> None:
    found = matcher('{"ok": ')
    copy = found.fork()
    assert copy.accept_bytes(b"t")
    assert found.accept_bytes(b"f")
    assert (copy.jump_forward(), found.jump_forward()) == (b"rue", b"alse")


def test_within_a_character_the_rest_of_it_may_follow(matcher: Begin) -> None:
    found = matcher('{"ok": true, "städte": "K')
    assert found.accept_bytes("ö".encode()[:1])
    # Within a character, a library may know only some of the bytes that must follow.
    assert 'öln"'.encode()[1:].startswith(found.jump_forward())
    assert found.accept_bytes('öln"'.encode()[1:])


def test_behind_the_end_nothing_follows(compiler: GrammarCompiler, matcher: Begin) -> None:
    found = matcher('{"ok": true, "städte": "Bonn"}')
    mask = np.zeros((1, compiler.mask_width), np.int32)
    found.fill(mask, 0)
    assert mask[0][0] >> END & 1
    assert found.accept(END)
    assert found.ended
    assert found.jump_forward() == b""
    assert not found.accept_bytes(b" ")
    assert found.fork().ended
