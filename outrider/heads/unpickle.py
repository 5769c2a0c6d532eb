"""Reads one pickled file of tensors and writes it as safetensors; `convert` runs this module."""

from __future__ import annotations

import resource
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

# Memory besides the tensors. For a moment there are two copies of the tensors.
_SPARE_BYTES = 2**30


def convert(source: Path, target: Path) -> None:
    """Convert a file.

    Raises ValueError for anything but named tensors. For a file with code it raises the errors of
    torch's restricted reader.
    """
    # This reads only weights, in a separate process: the only place where a pickle may be opened.
    loaded = torch.load(source, map_location="cpu", weights_only=True)  # noqa: TID251
    save_file(_tensors(loaded), target)


def _limit(added: int) -> None:
    """Limit the memory that this process may add from now on."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform == "linux":
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        most = pages * resource.getpagesize() + added
        resource.setrlimit(resource.RLIMIT_AS, (most, most))


def _tensors(loaded: Any) -> dict[str, torch.Tensor]:
    """Return a file's tensors, keyed by name.

    The tensor of MiMo's mask_embedding.pt gets our name.
    """
    if not isinstance(loaded, dict):
        raise ValueError(f"it holds a {type(loaded).__name__}, not tensors by name")
    if set(loaded) == {"mask_token_id", "embedding"}:
        loaded = {"mask_embedding": loaded["embedding"].flatten()}
    for name, value in loaded.items():
        if not isinstance(name, str) or not isinstance(value, torch.Tensor):
            raise ValueError(f"its entry {name!r} is a {type(value).__name__}, not a tensor")
    # Return copies: safetensors refuses tensors that share memory, and some files have such
    # tensors.
    return {name: value.detach().clone().contiguous() for name, value in loaded.items()}


def _one_line(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


if __name__ == "__main__":
    paths = [Path(argument) for argument in sys.argv[1:]]
    try:
        _limit(paths[0].stat().st_size * 4 + _SPARE_BYTES)
        convert(*paths)
    # Anybody may have written the file, so any error is a reason to refuse it.
    except Exception as error:  # noqa: BLE001
        sys.exit(_one_line(error))
