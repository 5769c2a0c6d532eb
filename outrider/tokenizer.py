"""Loads a model's fast tokenizer without torch and computes its fingerprint.

Chat templates and limits of texts are elsewhere.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import os
from pathlib import Path

from huggingface_hub import constants, hf_hub_download, try_to_load_from_cache
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
)
from tokenizers import Tokenizer

from outrider.errors import OutriderError, Reason
from outrider.gguf import pretrained
from outrider.process.files import check_folder

log = logging.getLogger(__name__)

_HUB_TIMEOUT_S = 5.0


def model_file(model: str, name: str) -> Path | None:
    """Return the path of a model's file; None when the model has no file of this name.

    `model` is a directory, a GGUF file or a Hugging Face hub id. If the hub cannot be reached, a
    model whose config.json is cached counts as having only the cached files. Raises
    OutriderError(MODEL_NOT_FOUND) if `model` is no directory, no GGUF file and no model of the hub,
    cached or online, or if the hub refuses access to it; and what `check_model_folder` and
    `outrider.gguf.pretrained` raise.
    """
    directory = Path(pretrained(model))
    if directory.is_dir():
        check_model_folder(model)
        return directory / name if (directory / name).is_file() else None
    try:
        _look_for_hub()
        return Path(hf_hub_download(model, name))
    except LocalEntryNotFoundError as cause:
        if isinstance(try_to_load_from_cache(model, "config.json"), str):
            return None
        message = f"there is no directory {model}, and the hub cannot be reached"
        raise _not_found(message) from cause
    except EntryNotFoundError:
        return None
    except HFValidationError as cause:
        raise _not_found(f"there is no directory {model}") from cause
    except GatedRepoError as cause:
        message = f"{model} is gated on the hub; ask there for access, and set HF_TOKEN"
        raise _not_found(message) from cause
    except (HfHubHTTPError, OSError) as cause:
        raise _not_found(f"{model} is neither a directory nor a model of the hub") from cause


def check_model_folder(model: str) -> None:
    """Check that libraries can read the files of a model directory; other names pass.

    Raises OutriderError(INVALID_VALUE), with the file's name, for a pipe, a device, and a file that
    is larger than any real file of its kind.
    """
    if Path(model).is_dir():
        try:
            check_folder(Path(model))
        except OSError as cause:
            message = f"{cause.filename} cannot be read: {cause.strerror}"
            raise OutriderError(Reason.INVALID_VALUE, message, "model") from cause


def _not_found(message: str) -> OutriderError:
    return OutriderError(Reason.MODEL_NOT_FOUND, message, "model")


@functools.cache
def _look_for_hub() -> None:
    """If the hub does not answer, turn on offline mode for this process and its children.

    In online mode the hub's library would retry for half a minute before it reads its cache.
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
    """Return the tokenizer of a model directory, GGUF file or hub id.

    Raises OutriderError(MODEL_NOT_FOUND) when the model has no tokenizer.json, and what
    `model_file` raises.
    """
    path = model_file(model, "tokenizer.json")
    if path is None:
        raise _not_found(f"{model} has no tokenizer.json; save it with a fast tokenizer")
    return Tokenizer.from_file(str(path))


def end_token_ids(model: str, vocab_size: int) -> tuple[int, ...]:
    """Return the tokens that end an answer, read from the files of a model; log them.

    `model` is a directory, GGUF file or hub id. Of generation_config.json, config.json, and the
    files that name the tokenizer's eos_token, the first that names such tokens counts. The default
    end token of the model's type never counts, because in this model that id may stand for any
    token. Ids of `vocab_size` or above are left out. Raises OutriderError(MODEL_NOT_FOUND) when
    there is no such model, and OutriderError(INVALID_VALUE) when a file has something else in place
    of ids.
    """
    ids, place = _stated_ends(model)
    ids = tuple(i for i in ids if i < vocab_size)
    if ids:
        log.info("%s: the ids %s end a text, by its %s", model, ", ".join(map(str, ids)), place)
    else:
        log.warning("%s: no token ends a text, by its %s", model, place)
    return ids


def _stated_ends(model: str) -> tuple[tuple[int, ...], str]:
    """Return the ids of the first file that states any, and the file's name."""
    for name in ("generation_config.json", "config.json"):
        config = _object_of(model, name)
        text = _object(config.get("text_config"), f"{model}: {name}: text_config")
        found = [keys.get("eos_token_id") for keys in (config, text)]
        if (ids := token_ids(f"{model}: {name}: eos_token_id", *found)) is not None:
            return ids, name
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        token = _object_of(model, name).get("eos_token")
        text_of = token.get("content") if isinstance(token, dict) else token
        if isinstance(text_of, str) and model_file(model, "tokenizer.json") is not None:
            index = load_tokenizer(model).token_to_id(text_of)
            return () if index is None else (index,), f"{name}'s eos_token {text_of!r:.100}"
    return (), "files, which state none"


def _object_of(model: str, name: str) -> dict[str, object]:
    """Return the JSON object in a model's file; an empty object if there is no such file."""
    path = model_file(model, name)
    if path is None:
        return {}
    return _object(_json_of(path, f"{model}: {name}"), f"{model}: {name}")


def token_ids(place: str, *found: object) -> tuple[int, ...] | None:
    """Return the ids of a configuration: the first entry of `found` that is not None.

    This entry is an id or a list of ids; negative ids are left out. Returns None if all entries are
    None. Raises OutriderError(INVALID_VALUE), with a message that begins with `place`, for any
    other value.
    """
    first = next((each for each in found if each is not None), None)
    if first is None:
        return None
    ids = tuple(first) if isinstance(first, list | tuple) else (first,)
    # A bool is an int too, but no id.
    if any(type(i) is not int for i in ids):
        message = f"{place} must be a whole number or a list of these, not {first!r:.100}"
        raise OutriderError(Reason.INVALID_VALUE, message, "model")
    return tuple(i for i in ids if i >= 0)


def _json_of(path: Path, place: str) -> object:
    """Parse a file of JSON. Raises OutriderError(INVALID_VALUE) that names `place`."""
    try:
        return json.loads(path.read_text())
    # ValueError is also raised for bytes that are not UTF-8, and numbers of thousands of digits.
    except (ValueError, RecursionError):
        raise OutriderError(Reason.INVALID_VALUE, f"{place} must be JSON", "model") from None


def _object(found: object, place: str) -> dict[str, object]:
    """Return a JSON object, empty for null. Other values raise OutriderError(INVALID_VALUE)."""
    if found is None:
        return {}
    if not isinstance(found, dict):
        raise OutriderError(Reason.INVALID_VALUE, f"{place} must be an object", "model")
    return found


def fingerprint(tokenizer: Tokenizer) -> str:
    """Return the SHA-256 (hex) over the id-to-token table, added tokens included.

    Two fingerprints are equal exactly when all ids stand for the same tokens.
    """
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    table = sorted((index, token) for token, index in vocabulary.items())
    text = json.dumps(table, ensure_ascii=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()
