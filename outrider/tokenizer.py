"""Loads a model's fast tokenizer without torch, and names it by a fingerprint. Knows no chat template and no text limits."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from huggingface_hub import hf_hub_download
from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from tokenizers import Tokenizer

from outrider.errors import OutriderError, Reason


def model_file(model: str, name: str) -> Path | None:
    """The file `name` of a model directory or of a hub id; None when the model has no such file.

    Raises OutriderError(MODEL_NOT_FOUND) when `model` is neither a directory nor a hub id that can be reached.
    """
    directory = Path(model)
    if directory.is_dir():
        return directory / name if (directory / name).is_file() else None
    try:
        return Path(hf_hub_download(model, name))
    except LocalEntryNotFoundError as cause:
        message = f"{model} is not a directory, and the hub cannot be reached to look for it there"
        raise OutriderError(Reason.MODEL_NOT_FOUND, message, "model") from cause
    except EntryNotFoundError:
        return None
    except (HFValidationError, HfHubHTTPError, OSError) as cause:
        raise OutriderError(Reason.MODEL_NOT_FOUND, f"{model} is neither a directory nor a model of the hub", "model") from cause


def load_tokenizer(model: str) -> Tokenizer:
    """The tokenizer of a model directory or hub id; raises OutriderError(MODEL_NOT_FOUND) when it has no tokenizer.json."""
    path = model_file(model, "tokenizer.json")
    if path is None:
        raise OutriderError(Reason.MODEL_NOT_FOUND, f"{model} has no tokenizer.json; save it with a fast tokenizer", "model")
    return Tokenizer.from_file(str(path))


def fingerprint(tokenizer: Tokenizer) -> str:
    """SHA-256 (hex) over the id-to-token table, added tokens included: equal exactly when ids mean the same."""
    table = sorted((index, token) for token, index in tokenizer.get_vocab(with_added_tokens=True).items())
    return hashlib.sha256(json.dumps(table, ensure_ascii=True, separators=(",", ":")).encode()).hexdigest()
