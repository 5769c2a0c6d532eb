"""Names the weights that a family has read, and refuses files that changed during the reading."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from outrider.errors import invalid
from outrider.gguf import pretrained, unpacked
from outrider.lm.weights_fingerprint import weights_fingerprint

_Model = TypeVar("_Model")

# The first characters of the fingerprint suffice to tell versions apart.
_CHARACTERS = 12


def load_versioned(setting: str, model: str, load: Callable[[], _Model]) -> tuple[_Model, str]:
    """Return what `load` returns, and the version of the files: equal for equal weights.

    `model` is a directory, a GGUF file or a hub id. Raises OutriderError(INVALID_VALUE) that names
    the setting if the files changed, because `load` may have read a part of each version.
    """
    # A GGUF file may have changed since it was unpacked.
    unpacked.cache_clear()
    before = _stamps(model)
    loaded = load()
    version = weights_fingerprint(model)[:_CHARACTERS]
    if _stamps(model) != before:
        raise invalid(setting, f"the files of {model} changed while they were read")
    return loaded, version


def _stamps(model: str) -> list[tuple[str, int, int, int]]:
    """Return each file's name, inode, size and time of modification; nothing for a hub id."""
    directory = Path(pretrained(model))
    paths = sorted([*directory.glob("*.safetensors"), *directory.glob("*.json")])
    stats = [(path.name, path.stat()) for path in paths]
    return [(name, stat.st_ino, stat.st_size, stat.st_mtime_ns) for name, stat in stats]
