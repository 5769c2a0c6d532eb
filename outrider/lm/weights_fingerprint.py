"""A checkpoint's fingerprint: equal for equal config and tensors, whatever files these are in.

Only samples of each tensor are read, so hundreds of gigabytes take seconds. A checkpoint that was
trained further or quantised gets another fingerprint. But the fingerprint does not tell apart
checkpoints that somebody made to look alike.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from outrider.tokenizer import model_file

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_SAMPLES = 16
_SAMPLE_BYTES = 256
# Keys of a checkpoint's config that tell its origin or the type to compute in. `ModelInfo` has this
# type beside the weights' fingerprint.
_ORIGIN = ("_name_or_path", "transformers_version", "dtype", "torch_dtype")


def weights_fingerprint(model: str) -> str:
    """Return a SHA-256 (hex) over `_config` and each tensor's name, type, shape and samples.

    `model` is a directory or a hub id. A model whose tensors are not found in safetensors has a
    random fingerprint, which equals no other fingerprint. Raises OutriderError(MODEL_NOT_FOUND) if
    there is no such model.
    """
    files = _files(model)
    if not files:
        return secrets.token_hex(32)
    digest = hashlib.sha256()
    digest.update(_config(model))
    for _, part in sorted(part for file in files for part in _tensors(file)):
        digest.update(part)
    return digest.hexdigest()


def _files(model: str) -> list[Path]:
    single = model_file(model, _SINGLE)
    if single is not None:
        return [single]
    index = model_file(model, _INDEX)
    if index is None:
        # A head's files may have any names.
        return sorted(Path(model).glob("*.safetensors"))
    names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    found = [model_file(model, name) for name in names]
    return [path for path in found if path is not None]


def _config(model: str) -> bytes:
    """Return the config without the keys in `_ORIGIN`."""
    path = model_file(model, "config.json")
    values = {} if path is None else json.loads(path.read_text())
    kept = {key: value for key, value in values.items() if key not in _ORIGIN}
    return json.dumps(kept, sort_keys=True).encode()


def _tensors(path: Path) -> Iterator[tuple[str, bytes]]:
    """Yield each tensor's name and digest."""
    with path.open("rb") as file:
        [size] = struct.unpack("<Q", file.read(8))
        header: dict[str, Any] = json.loads(file.read(size))
        start = 8 + size
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            begin, end = entry["data_offsets"]
            digest = hashlib.sha256()
            digest.update(json.dumps([name, entry["dtype"], entry["shape"]]).encode())
            for offset in _offsets(end - begin):
                count = min(_SAMPLE_BYTES, end - begin - offset)
                digest.update(os.pread(file.fileno(), count, start + begin + offset))
            yield name, digest.digest()


def _offsets(byte_count: int) -> list[int]:
    """Return where the samples of a tensor begin: evenly from its first to its last bytes."""
    last = byte_count - _SAMPLE_BYTES
    if last <= _SAMPLES * _SAMPLE_BYTES:
        return list(range(0, byte_count, _SAMPLE_BYTES))
    return [last * i // (_SAMPLES - 1) for i in range(_SAMPLES)]
