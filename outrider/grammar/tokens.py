"""Prepares a model's tokens for LLGuidance: the bytes of each token within a text."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from tokenizers import Tokenizer

from outrider.tokenizer import load_tokenizer


def for_llguidance(tokenizer: Tokenizer, vocab_size: int, stop_token_ids: Sequence[int]) -> Any:
    """Return LLGuidance's form of a tokenizer; `vocab_size` is the logits' width."""
    import llguidance

    described = within_texts(tokenizer.to_str())
    ends = list(stop_token_ids) or None
    return llguidance.LLTokenizer(described, n_vocab=vocab_size, eos_token=ends)


def within_texts(described: str) -> str:
    """Return a tokenizer's JSON, changed so that each text is read as the middle of a longer one.

    LLGuidance tokenises the text that must follow. If a tokenizer put a space before each text, the
    text that must follow would begin with a wrong token. LLGuidance also does not know that the
    decoder Metaspace writes "▁" as a space.
    """
    parts = json.loads(described)
    for name in ("truncation", "padding"):
        parts[name] = None
    return json.dumps(_within_texts(parts))


def _within_texts(part: Any, name: str = "") -> Any:
    if isinstance(part, list):
        return [_within_texts(each, name) for each in part]
    if not isinstance(part, dict):
        return part
    kind = part.get("type")
    if kind == "Metaspace" and name in ("decoder", "decoders"):
        return {"type": "Replace", "pattern": {"String": part["replacement"]}, "content": " "}
    if kind == "Metaspace":
        return {**part, "prepend_scheme": "never"}
    if kind == "ByteLevel":
        return {**part, "add_prefix_space": False}
    # A vocabulary is large, and none of its entries has to be changed.
    return {
        key: inner if key in ("model", "added_tokens") else _within_texts(inner, key)
        for key, inner in part.items()
    }


def token_bytes(model: str) -> list[bytes]:
    """Return the bytes of each token of a model's tokenizer; for special tokens, their names.

    `model` is a directory, GGUF file or hub id. An id without a token has no bytes. Raises
    OutriderError(MODEL_NOT_FOUND) if the model has no tokenizer.
    """
    tokenizer = load_tokenizer(model)
    count = max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1
    return bytes_of(for_llguidance(tokenizer, count, ()), tokenizer, count)


def bytes_of(loaded: Any, tokenizer: Tokenizer, count: int) -> list[bytes]:
    """Return the result of `token_bytes` for a loaded tokenizer and LLGuidance's form of it."""
    known = set(tokenizer.get_vocab(with_added_tokens=True).values())
    # LLGuidance marks special tokens with the byte 0xFF, so it returns no bytes for the token that
    # is this byte.
    return [loaded.decode_bytes([i]) or b"\xff" if i in known else b"" for i in range(count)]
