"""Draft models with other vocabularies, made from the bundled model, and their tokenizers."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.normalizers import Prepend, Replace
from tokenizers.normalizers import Sequence as Sequences
from tokenizers.pre_tokenizers import Split
from tokenizers.trainers import BpeTrainer

MODEL = Path(__file__).parents[1] / "models/draft"
SPECIAL = 4
"""The number of special tokens. They come first."""


def order_of(seed: int, removed_share: float = 0.0) -> list[int]:
    """Return the bundled ids in another order.

    Each ordinary token of several bytes is left out with the probability `removed_share`.
    """
    source = random.Random(seed)
    tokens = sorted((i, token) for token, i in _tokenizer()["model"]["vocab"].items())
    ids = [
        i
        for i, token in tokens
        if i < SPECIAL or len(token) == 1 or source.random() >= removed_share
    ]
    source.shuffle(ids)
    return ids


def tokenizer_of(order: Sequence[int], *, rename_end: bool = False) -> str:
    """Return the bundled tokenizer.json with only these tokens.

    A token's id is its place in `order`. With `rename_end`, the token that ends a text has another
    name.
    """
    data = _tokenizer()
    names = {i: token for token, i in data["model"]["vocab"].items()}
    new = {names[i]: place for place, i in enumerate(order)}
    data["model"]["merges"] = [
        pair for pair in data["model"]["merges"] if {*pair, "".join(pair)} <= new.keys()
    ]
    for added in data["added_tokens"]:
        added["id"] = new[added["content"]]
    if rename_end:
        new["</s>"] = new.pop("<|endoftext|>")
        for added in data["added_tokens"]:
            added["content"] = added["content"].replace("<|endoftext|>", "</s>")
    data["model"]["vocab"] = new
    return json.dumps(data)


def files_of(order: Sequence[int]) -> dict[str, str]:
    """Return the bundled draft model's text files with the vocabulary `order`, keyed by name."""
    files = {"tokenizer.json": tokenizer_of(order)}
    files["tokenizer_config.json"] = (MODEL / "tokenizer_config.json").read_text()
    for name in ("config.json", "generation_config.json"):
        data = json.loads((MODEL / name).read_text())
        for key in ("bos_token_id", "pad_token_id"):
            data[key] = order.index(data[key])
        data["eos_token_id"] = [order.index(i) for i in data["eos_token_id"]]
        if "vocab_size" in data:
            data["vocab_size"] = len(order)
        files[name] = json.dumps(data)
    return files


def save_model(folder: Path, order: Sequence[int]) -> None:
    """Write the bundled draft model with the vocabulary `order`."""
    folder.mkdir()
    for name, text in files_of(order).items():
        (folder / name).write_text(text)
    weights = load_file(MODEL / "model.safetensors")
    weights["model.embed_tokens.weight"] = weights["model.embed_tokens.weight"][list(order)].clone()
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def _tokenizer() -> Any:
    return json.loads((MODEL / "tokenizer.json").read_text())


def save_llama_like(folder: Path, texts: Sequence[str]) -> None:
    """Train, on `texts`, a tokenizer that is built like the tokenizer of Llama 2, and write it.

    The tokenizer puts <s> and a blank before a text, does not split words, and has tokens for
    bytes.
    """
    special = ["<unk>", "<s>", "</s>"]
    tokenizer = Tokenizer(BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = Sequences([Prepend("▁"), Replace(" ", "▁")])
    tokenizer.pre_tokenizer = Split("▁", "merged_with_next")
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = BpeTrainer(
        vocab_size=1500, special_tokens=[*special, *byte_tokens], show_progress=False
    )
    tokenizer.train_from_iterator([" ".join(text.split()) for text in texts], trainer)
    data = json.loads(tokenizer.to_str())
    data["pre_tokenizer"] = None
    data["added_tokens"] = [token for token in data["added_tokens"] if token["content"] in special]
    begin = {"id": "<s>", "ids": [special.index("<s>")], "tokens": ["<s>"]}
    text = {"Sequence": {"id": "A", "type_id": 0}}
    data["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, text],
        "pair": [text, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<s>": begin},
    }
    decoders = [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
        {"type": "Strip", "content": " ", "start": 1, "stop": 0},
    ]
    data["decoder"] = {"type": "Sequence", "decoders": decoders}
    folder.mkdir()
    (folder / "tokenizer.json").write_text(json.dumps(data))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>"})
    )
    (folder / "config.json").write_text(json.dumps({"eos_token_id": special.index("</s>")}))
