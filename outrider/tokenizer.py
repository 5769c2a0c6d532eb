"""Loads a model's fast tokenizer without torch, and names it by a fingerprint. Knows no chat template and no text limits."""

from __future__ import annotations

import functools
import hashlib
import json
import os
from pathlib import Path

from huggingface_hub import constants, hf_hub_download
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
)
from tokenizers import Tokenizer

from outrider.errors import OutriderError, Reason

_HUB_TIMEOUT_S = 5.0


def model_file(model: str, name: str) -> Path | None:
    """The file `name` of a model directory or of a hub id; None when the model has no such file.

    Raises OutriderError(MODEL_NOT_FOUND) when `model` is neither a directory nor a hub id that is cached or can be reached.
    """
    directory = Path(model)
    if directory.is_dir():
        return directory / name if (directory / name).is_file() else None
    try:
        _look_for_hub()
        return Path(hf_hub_download(model, name))
    except LocalEntryNotFoundError as cause:
        raise _not_found(
            f"there is no directory {model}, and the hub cannot be reached to look for it there"
        ) from cause
    except EntryNotFoundError:
        return None
    except HFValidationError as cause:
        raise _not_found(f"there is no directory {model}") from cause
    except GatedRepoError as cause:
        raise _not_found(
            f"{model} is gated on the hub; ask there for access, and set HF_TOKEN"
        ) from cause
    except (HfHubHTTPError, OSError) as cause:
        raise _not_found(f"{model} is neither a directory nor a model of the hub") from cause


def _not_found(message: str) -> OutriderError:
    return OutriderError(Reason.MODEL_NOT_FOUND, message, "model")


@functools.cache
def _look_for_hub() -> None:
    """Turn the hub's offline mode on, here and in processes started from here, if it does not answer.

    Without it the hub's library tries for half a minute before it takes what is cached.
    """
    import httpx

    if constants.HF_HUB_OFFLINE:
        return
    try:
        httpx.head(constants.ENDPOINT, timeout=_HUB_TIMEOUT_S)
    except httpx.HTTPError:
        constants.HF_HUB_OFFLINE = True
        os.environ["HF_HUB_OFFLINE"] = "1"


def load_tokenizer(model: str) -> Tokenizer:
    """The tokenizer of a model directory or hub id; raises OutriderError(MODEL_NOT_FOUND) when it has no tokenizer.json."""
    path = model_file(model, "tokenizer.json")
    if path is None:
        raise OutriderError(
            Reason.MODEL_NOT_FOUND,
            f"{model} has no tokenizer.json; save it with a fast tokenizer",
            "model",
        )
    return Tokenizer.from_file(str(path))


def fingerprint(tokenizer: Tokenizer) -> str:
    """SHA-256 (hex) over the id-to-token table, added tokens included: equal exactly when ids mean the same."""
    table = sorted(
        (index, token) for token, index in tokenizer.get_vocab(with_added_tokens=True).items()
    )
    return hashlib.sha256(
        json.dumps(table, ensure_ascii=True, separators=(",", ":")).encode()
    ).hexdigest()
