"""Finds the checkpoint that a GGUF file was unpacked to; if there is none, unpacks the file first.

None of our engines computes with GGUF's quantised blocks. So the weights are dequantised once into
a directory that every process reads like any other model. `outrider.lm.unpack_gguf` does this in a
process of its own, because processes that do not import torch need the directory too.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import logging
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from outrider import smollm2
from outrider.errors import OutriderError, Reason, invalid

log = logging.getLogger(__name__)

_SHARD = re.compile(r"-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf$")


def is_gguf(model: str) -> bool:
    """Return whether a model's name names a GGUF file."""
    return model.endswith(".gguf")


def pretrained(model: str) -> str:
    """Return the directory or hub id under which libraries such as `transformers` find a model.

    For a GGUF file this is the directory that it is unpacked to. The name `smollm2` stands for
    SmolLM2's GGUF file. Raises what `unpacked` and `smollm2.gguf_file` raise.
    """
    if model == smollm2.NAME:
        model = smollm2.gguf_file()
    return str(unpacked(model)) if is_gguf(model) else model


@functools.cache
def unpacked(file: str) -> Path:
    """Return the directory with the model, tokenizer and chat template of a GGUF file.

    If the model is in several files (shards), `file` may be any of them. The hash of the content
    names the directory, so a changed file is unpacked anew. One process unpacks, and others wait.
    Raises OutriderError: MODEL_NOT_FOUND if the file is missing, INVALID_VALUE if it cannot be
    unpacked.
    """
    shards = _shards(file)
    directory = _cache() / _digest(shards)
    with directory.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not directory.is_dir():
            _unpack(file, shards, directory)
    return directory


def _shards(file: str) -> list[Path]:
    """Return all files of the model, in order."""
    shard = _SHARD.search(file)
    paths = [Path(file)]
    if shard is not None:
        count = shard["count"]
        stem = file[: shard.start()]
        paths = [Path(f"{stem}-{i:05}-of-{count}.gguf") for i in range(1, int(count) + 1)]
    for path in paths:
        if not path.is_file():
            raise OutriderError(Reason.MODEL_NOT_FOUND, f"there is no file {path}", "model")
    return paths


def _cache() -> Path:
    """Return the directory for unpacked models, as the XDG specification places caches."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    place = base / "outrider" / "gguf"
    try:
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as cause:
        why = f"{place} cannot be made ({cause.strerror}); set XDG_CACHE_HOME to another directory"
        raise invalid("model", f"is a GGUF file, which is unpacked into a cache: {why}") from cause
    return place


def _digest(paths: list[Path]) -> str:
    """Return the SHA-256, in hexadecimal digits, of the SHA-256 digests of the files."""
    digest = hashlib.sha256()
    for path in paths:
        with path.open("rb") as content:
            digest.update(hashlib.file_digest(content, "sha256").digest())
    return digest.hexdigest()


def _unpack(file: str, shards: list[Path], directory: Path) -> None:
    """Unpack the shards into `directory`, which appears when it is complete."""
    size = sum(path.stat().st_size for path in shards) / 2**30
    told = "unpacking %s (%.1f GiB) into %s, where quantised weights are bfloat16"
    log.warning(f"{told}; later starts read this directory", file, size, directory)
    with tempfile.TemporaryDirectory(prefix="unpacking-", dir=directory.parent) as temporary:
        made = Path(temporary) / "model"
        command = [sys.executable, "-m", "outrider.lm.unpack_gguf", str(made), *map(str, shards)]
        done = subprocess.run(command, stdout=subprocess.PIPE, check=False)
        if done.returncode != 0:
            why = done.stdout.decode(errors="replace").strip()
            if not why:
                why = f"{file}: the process that unpacks it ended with status {done.returncode}"
            raise OutriderError(Reason.INVALID_VALUE, why, "model")
        if _digest(shards) != directory.name:
            raise invalid("model", f"{file} changed while it was unpacked")
        made.rename(directory)
