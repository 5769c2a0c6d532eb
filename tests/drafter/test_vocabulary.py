"""A draft model with another tokenizer encodes the target's text anew."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from drafter_svc.families.vocabulary import TokenTable, Vocabulary, load_vocabulary
from outrider.errors import OutriderError
from outrider.grammar.tokens import token_bytes
from outrider.tokenizer import end_token_ids, load_tokenizer
from tests.other_vocabularies import MODEL, files_of, order_of, save_llama_like

ROOT = Path(__file__).parents[2]
CODE = Path(__file__).read_text()
WORDS = (ROOT / "models/LICENSE-PSF.txt").read_text()[:4000]
ODD = (
    "naïve déjà vu — 20 €, 🙂🙃🙂 中文字符，日本語テキスト\n\n \n  \n\tЯ \u0301x ß\r\n  ...   -----"
)
TEXT = f"{ODD}{WORDS}{ODD}{CODE[:3000]}{ODD}"

Save = Callable[[str], Path]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Save:
    """Write the tokenizers; return a function that maps a tokenizer's name to its folder."""
    root = tmp_path_factory.mktemp("tokenizers")
    orders = {
        "permuted": order_of(1),
        "smaller": order_of(2, 0.4),
        "tiny": order_of(3, 1.0),
    }
    for name, order in orders.items():
        (root / name).mkdir()
        for file, text in files_of(order).items():
            (root / name / file).write_text(text)
    save_llama_like(root / "llama", [WORDS, CODE])

    def find(name: str) -> Path:
        return MODEL if name == "bundled" else root / name

    return find


@cache
def vocabulary_of(own: Path, target: Path) -> Vocabulary:
    size = load_tokenizer(str(own)).get_vocab_size()
    return load_vocabulary(str(own), size, end_token_ids(str(own), size), str(target))


PAIRS = [
    ("permuted", "bundled"),
    ("smaller", "bundled"),
    ("bundled", "smaller"),
    ("bundled", "tiny"),
    ("llama", "bundled"),
    ("bundled", "llama"),
]


@pytest.mark.parametrize(("own", "target"), PAIRS)
def test_the_text_is_encoded_as_a_whole_however_it_is_committed(
    folder: Save, own: str, target: str
) -> None:
    source = random.Random(5)
    vocabulary = vocabulary_of(folder(own), folder(target))
    tokens = load_tokenizer(str(folder(target))).encode(TEXT).ids
    text = vocabulary.begin(tokens[:9])
    count = 9
    while count < len(tokens):
        count = min(len(tokens), count + source.randint(1, 6))
        text.follow(tokens[:count])
    # The tokenizer of a target like Llama 2 puts a blank before the text.
    whole = (" " if target == "llama" else "") + TEXT
    assert text.ids == load_tokenizer(str(folder(own))).encode(whole).ids


@pytest.mark.parametrize("target", ["bundled", "smaller", "tiny"])
def test_within_a_character_the_draft_model_reads_its_bytes(folder: Save, target: str) -> None:
    vocabulary = vocabulary_of(folder("permuted"), folder(target))
    own_bytes = token_bytes(str(folder("permuted")))
    target_bytes = token_bytes(str(folder(target)))
    tokens = load_tokenizer(str(folder(target))).encode(f"Grüße: {ODD}").ids
    text = vocabulary.begin(tokens[:1])
    within = 0
    for count in range(2, len(tokens) + 1):
        text.follow(tokens[:count])
        written = b"".join(target_bytes[token] for token in tokens[:count])
        assert b"".join(own_bytes[token] for token in text.ids) == written
        within += written.decode(errors="ignore").encode() != written
    assert within > 20


def test_bytes_that_are_no_text_are_read_one_by_one(folder: Save) -> None:
    vocabulary = vocabulary_of(folder("permuted"), MODEL)
    own = {text: i for i, text in enumerate(token_bytes(str(folder("permuted"))))}
    of_byte = {text: i for i, text in enumerate(token_bytes(str(MODEL))) if len(text) == 1}
    broken = b"\xff\xfe\x80\xe2\x82A\xc3"
    text = vocabulary.begin([of_byte[bytes([byte])] for byte in broken])
    assert text.ids == [own[bytes([byte])] for byte in broken]


@pytest.mark.parametrize("own", ["smaller", "llama"])
@pytest.mark.parametrize("odd", ["ab" * 1500, "=" * 2000, "中" * 500, "\n " * 800])
def test_a_commit_encodes_the_end_of_a_text_alone(
    folder: Save, own: str, odd: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some texts have no boundaries between words, and a cut within a word may add a token."""
    vocabulary = vocabulary_of(folder(own), MODEL)
    tokens = load_tokenizer(str(MODEL)).encode(WORDS + odd).ids
    lengths: list[int] = []
    encode = vocabulary.encode

    def counted(tokens: list[int], *, at_beginning: bool) -> object:
        lengths.append(len(tokens))
        return encode(tokens, at_beginning=at_beginning)

    text = vocabulary.begin(tokens[:500])
    monkeypatch.setattr(vocabulary, "encode", counted)
    for count in range(501, len(tokens) + 1):
        text.follow(tokens[:count])
    assert max(lengths[1:]) < 200
    whole = load_tokenizer(str(folder(own))).encode(WORDS + odd).ids
    assert len(text.ids) < 1.1 * len(whole) + 20


@pytest.mark.parametrize("own", ["permuted", "smaller"])
def test_a_commit_keeps_the_tokens_that_are_still_right(folder: Save, own: str) -> None:
    """The KV cache is simulated through commits, with right and with wrong guesses."""
    source = random.Random(7)
    vocabulary = vocabulary_of(folder(own), MODEL)
    tokens = load_tokenizer(str(MODEL)).encode(TEXT).ids
    text = vocabulary.begin(tokens[:9])
    count = 9
    kept = read = 0
    while count < len(tokens) - 12:
        new = source.randint(1, 6)
        held = tokens[count : count + source.randint(0, 9)]
        held = [token for token in held if vocabulary.own_of[token] >= 0]
        after = tokens[count : count + max(new, len(held))]
        held = held if held == after[: len(held)] else []
        cache = [*text.ids, *text.of_guesses(held)]
        count += new
        guesses = after[new:]
        guesses = (
            guesses if min(map(vocabulary.own_of.__getitem__, guesses), default=0) >= 0 else []
        )
        same = text.follow(tokens[:count], held, guesses)
        now = [*text.ids, *text.of_guesses(guesses)]
        assert cache[:same] == now[:same]
        assert cache[same : same + 1] != now[same : same + 1] or same == len(cache)
        kept += same
        read += len(cache)
    # Only the last word and little more is encoded again.
    assert kept > read - 4 * count


def test_special_tokens_and_the_end_of_a_text_are_those_of_the_draft_model(folder: Save) -> None:
    permuted, llama = folder("permuted"), folder("llama")
    ids = {
        name: load_tokenizer(str(permuted)).token_to_id(name) for name in ("<|user|>", "<|end|>")
    }
    vocabulary = vocabulary_of(permuted, MODEL)
    user, end = load_tokenizer(str(MODEL)).encode("<|user|><|end|>").ids
    assert vocabulary.begin([user, end]).ids == [ids["<|user|>"], ids["<|end|>"]]
    # Llama's tokenizer puts <s> before a text; its only other special token is </s>.
    assert vocabulary_of(llama, MODEL).begin([user]).ids[:1] == [1]
    assert vocabulary_of(llama, MODEL).own_of[0] == 2
    assert vocabulary_of(MODEL, llama).begin([1, 2]).ids == [0]


def test_a_target_of_several_parts_ends_its_texts_as_its_text_config_says(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.mkdir()
    for file, text in files_of(order_of(1)).items():
        (target / file).write_text(text)
    (target / "generation_config.json").unlink()
    config = json.loads((target / "config.json").read_text())
    ends = config.pop("eos_token_id")
    (target / "config.json").write_text(json.dumps({"text_config": {"eos_token_id": ends}}))
    assert vocabulary_of(MODEL, target).end_ids == tuple(ends)


def test_a_name_of_a_special_token_in_a_text_is_text(folder: Save) -> None:
    """A target that lacks the special token writes the token's name in letters."""
    vocabulary = vocabulary_of(MODEL, folder("llama"))
    tokens = load_tokenizer(str(folder("llama"))).encode("say <|end|> now").ids
    assert min(vocabulary.begin(tokens).ids) > 3


def test_vocabularies_with_little_in_common_are_refused() -> None:
    tokenizer = load_tokenizer(str(MODEL))
    known = token_bytes(str(MODEL))
    own = TokenTable(tokenizer, known, (0,))
    shared = [text if i % 30 == 0 else b"\0" + text for i, text in enumerate(known)]
    with pytest.raises(
        OutriderError, match=r"of the draft model's 4092 tokens only 136 are .*4092"
    ):
        Vocabulary(own, TokenTable(tokenizer, shared, (0,)))
