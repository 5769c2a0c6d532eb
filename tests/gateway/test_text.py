"""Detokenisation and stop strings do not depend on how the tokens are cut into chunks."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from gateway.text.prompts import Prompts
from gateway.text.text_stream import Detokenizer, StopScanner, TextStream, TokenOffsets, TokenTable
from gateway.tools.reader import Content, Part

VOCAB_SIZE = 4096
TEXTS = st.text(max_size=40) | st.sampled_from(
    ["naïve 😀 family 👨‍👩‍👧 ok", "日本語テキスト", "a\u2028b\x00c", "é" * 20]
)
ANY_IDS = st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=40)


def chunks(ids: list[int], cuts: list[int]) -> list[list[int]]:
    borders = [0, *sorted(min(cut, len(ids)) for cut in cuts), len(ids)]
    return [ids[start:end] for start, end in pairwise(borders)]


def content(parts: Sequence[Part]) -> str:
    """The text of parts that are content alone."""
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
    """With sentencepiece's byte fallback. A token whose text is U+FFFD has its bytes."""
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
    """As Llama 2's: "<unk>", "<s>", "▁Hello", "▁world", and the bytes of 😀 and é."""
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
        (0, "<s>Hello world😀é", [0, 3, 8, 14, 14, 14, 14, 15, 15]),
        (7, "", [7, 7, 12, 18, 18, 18, 18, 19, 19]),
    ],
)
def test_token_offsets_are_where_the_text_has_the_tokens(
    at: int, text: str, begin: list[int]
) -> None:
    offsets = TokenOffsets(TokenTable(byte_fallback()), at, text)
    assert [offsets.push(index) for index in range(1, 10)] == begin


def cut_at_stop(text: str, stops: list[str]) -> str:
    """The definition: cut at the stop string that ends first; of several, at the longest."""
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
    """As in vLLM, a stop string may begin among them and end behind them."""
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
