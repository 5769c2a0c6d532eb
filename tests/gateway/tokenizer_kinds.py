"""Small tokenizers of each kind that models have, trained on a few lines."""

from __future__ import annotations

import json
import string
from functools import cache

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

_LINES = [
    "The number is not not known",
    "  two  spaces, naïve 日本語 words\n\tand the end of the\n",
] * 4
SPECIAL = ["<unk>", "<s>", "</s>"]
_BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def _strip(count: int) -> decoders.Decoder:
    return decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", count, 0),
        ]
    )


def _metaspace(scheme: str, decoder: decoders.Decoder, *, prepends: bool) -> Tokenizer:
    made = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme=scheme)
    made.pre_tokenizer = pre_tokenizer
    if prepends:
        steps = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        made.normalizer = normalizers.Sequence(steps)
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=SPECIAL + _BYTES,
        initial_alphabet=[*string.ascii_letters, "."],
        show_progress=False,
    )
    made.train_from_iterator(_LINES, trainer)
    if prepends:
        made.pre_tokenizer = None
    made.decoder = decoder
    # Bytes must be tokens of the model, not added tokens: decoders see only the model's tokens.
    described = json.loads(made.to_str())
    described["added_tokens"] = [
        each for each in described["added_tokens"] if each["content"] in SPECIAL
    ]
    loaded: Tokenizer = Tokenizer.from_str(json.dumps(described))
    return loaded


def _byte_level(*, add_prefix_space: bool) -> Tokenizer:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator(_LINES, trainer)
    return made


def _fallback_and_metaspace(scheme: str) -> decoders.Decoder:
    spaces = decoders.Metaspace("▁", prepend_scheme=scheme)
    return decoders.Sequence([spaces, decoders.ByteFallback(), decoders.Fuse()])


KINDS = {
    "byte level": lambda: _byte_level(add_prefix_space=False),
    "byte level, prefix space": lambda: _byte_level(add_prefix_space=True),
    "llama 2": lambda: _metaspace("never", _strip(1), prepends=True),
    "mistral": lambda: _metaspace("first", _strip(1), prepends=False),
    "gemma": lambda: _metaspace("never", _strip(0), prepends=False),
    "always": lambda: _metaspace("always", _fallback_and_metaspace("always"), prepends=False),
    "first": lambda: _metaspace("first", _fallback_and_metaspace("first"), prepends=False),
    "never": lambda: _metaspace("never", _fallback_and_metaspace("never"), prepends=False),
    "two spaces stripped": lambda: _metaspace("first", _strip(2), prepends=False),
}


@cache
def tokenizer(kind: str) -> Tokenizer:
    """Return the tokenizer of a kind."""
    return KINDS[kind]()
