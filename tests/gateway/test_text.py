"""Detokenisation and stop strings do not depend on how the tokens are cut into chunks."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from gateway.text.prompts import Prompts
from gateway.text.text_stream import Detokenizer, StopScanner, TextStream, TokenOffsets
from gateway.text.token_table import TokenTable
from gateway.tools.formats import FORMATS
from gateway.tools.reader import CallBegin, Content, Part, Reading
from tests.gateway.tokenizer_kinds import KINDS, tokenizer

VOCAB_SIZE = 4096
TEXTS = st.text(max_size=40) | st.sampled_from(
    ["naïve 😀 family 👨‍👩‍👧 ok", "日本語テキスト", "a\u2028b\x00c", "é" * 20]
)
ANY_IDS = st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=40)


def chunks(ids: list[int], cuts: list[int]) -> list[list[int]]:
    borders = [0, *sorted(min(cut, len(ids)) for cut in cuts), len(ids)]
    return [ids[start:end] for start, end in pairwise(borders)]


def content(parts: Sequence[Part]) -> str:
    """Return the text of those parts that are content."""
    return "".join(part.text for part in parts if isinstance(part, Content))


@pytest.fixture(scope="module")
def table(prompts: Prompts) -> TokenTable:
    return TokenTable(prompts.tokenizer)


@given(text=TEXTS, cuts=st.lists(st.integers(0, 60)))
def test_chunks_of_any_text_join_to_the_text(
    text: str, cuts: list[int], prompts: Prompts, table: TokenTable
) -> None:
    detokenizer = Detokenizer(table)
    pieces = [detokenizer.push(chunk) for chunk in chunks(prompts.tokenizer.encode(text).ids, cuts)]
    assert "".join(pieces) + detokenizer.finish() == text
    assert not any("\ufffd" in piece for piece in pieces if "\ufffd" not in text)


@given(ids=ANY_IDS, cuts=st.lists(st.integers(0, 40)))
def test_chunks_of_any_ids_join_to_their_decoding(
    ids: list[int], cuts: list[int], prompts: Prompts, table: TokenTable
) -> None:
    detokenizer = Detokenizer(table)
    pieces = [detokenizer.push(chunk) for chunk in chunks(ids, cuts)]
    assert "".join(pieces) + detokenizer.finish() == prompts.tokenizer.decode(
        ids, skip_special_tokens=True
    )


@given(text=TEXTS)
def test_the_bytes_of_tokens_join_to_those_of_the_text(
    text: str, prompts: Prompts, table: TokenTable
) -> None:
    ids = prompts.tokenizer.encode(text, add_special_tokens=False).ids
    assert b"".join(table.text_and_bytes(token)[1] for token in ids) == text.encode()


def test_a_byte_token_has_its_own_byte() -> None:
    """With sentencepiece's byte fallback, a token whose text is U+FFFD has U+FFFD's own bytes."""
    vocabulary = {"<unk>": 0, "é": 1, "<0xC3>": 2, "<0xA9>": 3, "\ufffd": 4}
    tokenizer = Tokenizer(
        models.BPE(vocab=vocabulary, merges=[], byte_fallback=True, unk_token="<unk>")
    )
    tokenizer.decoder = decoders.ByteFallback()
    table = TokenTable(tokenizer)
    assert [table.text_and_bytes(token)[1] for token in (1, 2, 3, 4)] == [
        "é".encode(),
        b"\xc3",
        b"\xa9",
        "\ufffd".encode(),
    ]


def test_a_long_run_of_invalid_bytes_does_not_grow_the_tail(
    prompts: Prompts, table: TokenTable
) -> None:
    [emoji_start, *emoji_rest] = prompts.tokenizer.encode("😀").ids
    ids = [emoji_start] * 2000 + emoji_rest
    detokenizer = Detokenizer(table)
    pieces = [detokenizer.push([token]) for token in ids]
    assert len(detokenizer._tail) < 300
    assert "".join(pieces) + detokenizer.finish() == prompts.tokenizer.decode(ids)


def byte_fallback() -> Tokenizer:
    """Return a tokenizer like Llama 2's: <unk>, <s>, "▁Hello", "▁world", bytes of 😀 and é."""
    words = ["<unk>", "<s>", "▁Hello", "▁world", *(f"<0x{byte:02X}>" for byte in "😀é".encode())]
    tokenizer = Tokenizer(
        models.BPE(
            {word: index for index, word in enumerate(words)},
            [],
            unk_token="<unk>",
            byte_fallback=True,
        )
    )
    tokenizer.add_special_tokens(["<s>"])
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return tokenizer


def test_byte_fallback_tokenizers_keep_spaces_and_characters() -> None:
    detokenizer = Detokenizer(TokenTable(byte_fallback()))
    pieces = [detokenizer.push([index]) for index in range(2, 10)]
    assert pieces == ["Hello", " world", "", "", "", "😀", "", "é"]


@pytest.mark.parametrize(
    ("at", "text", "begin"),
    [
        (0, "Hello world😀é", [0, 0, 5, 11, 11, 11, 11, 12, 12]),
        (0, "<s> Hello world😀é", [0, 3, 9, 15, 15, 15, 15, 16, 16]),
        (7, "", [7, 7, 12, 18, 18, 18, 18, 19, 19]),
    ],
)
def test_token_offsets_are_where_the_text_has_the_tokens(
    at: int, text: str, begin: list[int]
) -> None:
    offsets = TokenOffsets(TokenTable(byte_fallback()), at, text)
    assert [offsets.push(index) for index in range(1, 10)] == begin


@cache
def kind_table(kind: str) -> TokenTable:
    return TokenTable(tokenizer(kind))


WORDS = st.lists(
    st.sampled_from(
        [" the", "the", " ", "  ", "é", "日本", "😀", "x", "\n", "\t", ".", "number is"]
    ),
    max_size=8,
).map("".join)


def listed(offsets: TokenOffsets, ids: Sequence[int]) -> list[tuple[str, bytes, int]]:
    """Return the text, bytes and offset of each token."""
    return [(*offsets.text_and_bytes(token), offsets.push(token)) for token in ids]


@pytest.mark.parametrize("kind", KINDS)
@given(text=WORDS, cut=st.integers(0, 20), bos=st.booleans())
@example(text=" the number is the", cut=0, bos=True)
@example(text=" the number is the", cut=2, bos=False)
@example(text="   x", cut=1, bos=False)
@example(text="é日本😀", cut=2, bos=True)
def test_wherever_a_text_is_cut_its_parts_join_to_the_text(
    kind: str, text: str, cut: int, bos: bool
) -> None:
    """The lists of tokens join too, and the offsets say where each token is in the text."""
    table = kind_table(kind)
    ids = ([1] if bos else []) + tokenizer(kind).encode(text).ids
    whole = tokenizer(kind).decode(ids)
    # `echo` is the part of the prompt that an echo shows.
    prompt, answer = ids[:cut], ids[cut:]
    shown = [token for token in prompt if token != 1]
    echo = table.decode(shown[: table.whole_characters(shown)])
    for pieces in ([answer], [[token] for token in answer]):
        detokenizer = Detokenizer(table, prompt=prompt)
        texts = [detokenizer.push(piece) for piece in pieces]
        assert echo + "".join(texts) + detokenizer.finish() == whole
    of_prompt = listed(TokenOffsets(table, text=echo), prompt)
    of_answer = listed(TokenOffsets(table, at=len(echo), prompt=prompt), answer)
    every = [each for each, token in zip(of_prompt + of_answer, ids, strict=True) if token != 1]
    assert b"".join(raw for _, raw, _ in every) == whole.encode()
    for name, _, at in every:
        assert "\ufffd" in name or whole[at : at + len(name)] == name
    assert [at for *_, at in every] == sorted(at for *_, at in every)


@pytest.mark.parametrize("kind", KINDS)
@given(ids=st.lists(st.integers(0, 290), max_size=20), cut=st.integers(0, 20))
def test_any_ids_after_a_prompt_add_what_decoding_both_adds(
    kind: str, ids: list[int], cut: int
) -> None:
    table = kind_table(kind)
    hidden = table.hidden_ids()
    shown = [token for token in ids[:cut] if token not in hidden]
    echo = table.decode(shown[: table.whole_characters(shown)])
    detokenizer = Detokenizer(table, prompt=ids[:cut])
    texts = [detokenizer.push([token]) for token in ids[cut:]]
    whole = tokenizer(kind).decode(ids)
    # A run of byte tokens that are no text has a replacement character for each byte.
    if "\ufffd" not in whole:
        assert echo + "".join(texts) + detokenizer.finish() == whole


@pytest.mark.parametrize("kind", KINDS)
def test_the_text_of_a_grammar_keeps_its_first_space_without_a_prompt_too(kind: str) -> None:
    table = kind_table(kind)
    ids = [token for token in tokenizer(kind).encode("x the").ids if token != 1]
    [last, *_] = [token for token in ids if table.text_and_bytes(token)[0].startswith(" t")]
    stream = TextStream(table, [], prompt=[1], within=True)
    assert content(stream.push([last])).startswith(" t")
    offsets = TokenOffsets(table, prompt=[1], within=True)
    assert offsets.text_and_bytes(last)[0].startswith(" t")


def cut_at_stop(text: str, stops: list[str]) -> str:
    """Return the text before the stop string that ends first, which is how stops are defined.

    If several end there, cut at the longest.
    """
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            return text[: end - max(map(len, ending))]
    return text


ALPHABET = "ab\n"


@given(
    text=st.text(ALPHABET, max_size=30),
    stops=st.lists(st.text(ALPHABET, min_size=1, max_size=5), min_size=1, max_size=4),
    cuts=st.lists(st.integers(0, 30)),
)
@example(text="abcX", stops=["abcX", "b"], cuts=[1, 2])
def test_stop_strings_cut_the_same_text_however_it_is_chunked(
    text: str, stops: list[str], cuts: list[int]
) -> None:
    scanner = StopScanner(stops)
    out = ""
    for start, end in pairwise([0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]):
        out += scanner.push(text[start:end])
        if scanner.found:
            break
    assert out + scanner.finish() == cut_at_stop(text, stops)


@given(
    text=st.text("ab#", max_size=30),
    stops=st.lists(st.text("ab#", min_size=1, max_size=4), min_size=1, max_size=3),
    min_tokens=st.integers(0, 30),
    cuts=st.lists(st.integers(0, 40)),
)
@example(text="xab#aby", stops=["ab", "b#a"], min_tokens=3, cuts=[])
def test_the_first_min_tokens_complete_no_stop_string(
    text: str,
    stops: list[str],
    min_tokens: int,
    cuts: list[int],
    prompts: Prompts,
    table: TokenTable,
) -> None:
    """As in vLLM, a stop string may begin among these tokens and end after them."""
    ids = prompts.tokenizer.encode(text, add_special_tokens=False).ids
    early = len(prompts.tokenizer.decode(ids[:min_tokens]))
    found = [
        (at + len(stop), at)
        for stop in stops
        for at in range(len(text))
        if text.startswith(stop, at) and at + len(stop) > early
    ]
    stream = TextStream(table, stops, min_tokens)
    out = ""
    for chunk in chunks(ids, cuts):
        if not stream.stopped:
            out += content(stream.push(chunk))
    out += "" if stream.stopped else content(stream.finish())
    assert out == (text[: min(found)[1]] if found else text)
    assert stream.token_count > min_tokens or not stream.stopped


@pytest.mark.parametrize("chunk", [1, 3, 1000])
def test_what_might_begin_a_stop_string_comes_before_the_call_that_follows(
    prompts: Prompts, table: TokenTable, chunk: int
) -> None:
    """No stop string reaches across a call, so the text held back is content before the call."""
    form = FORMATS["hermes"]
    call = '<tool_call>\n{"name": "weather", "arguments": {"days": 3}}\n</tool_call>'
    ids = prompts.tokenizer.encode(f"Wait STO{call}P now", add_special_tokens=False).ids
    stream = TextStream(table, ["STOP"], reading=Reading(form, {"weather": {}}))
    parts: list[Part] = []
    for at in range(0, len(ids), chunk):
        parts += stream.push(ids[at : at + chunk])
    parts += stream.finish()
    assert not stream.stopped
    kinds = [type(part) for part in parts]
    first = kinds.index(CallBegin)
    assert content(parts[:first]) == "Wait STO"
    assert content(parts[first:]) == "P now"
