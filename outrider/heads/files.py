"""Opens a head's folder: its config.json, and its weights, from safetensors only."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from outrider.errors import invalid
from outrider.heads.convert import pickles_of
from outrider.heads.spec import refusal

BY_VLLM = "serve the target with vLLM, whose own drafting may read such a head"
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_IDS = (torch.int64, torch.int32, torch.bool)
# A file of Git LFS begins with this in a clone that lacks the file's contents.
_LFS = b"version https://git-lfs"


class Keys:
    """The keys of a config.json, or of a section in it. Values are checked when they are read."""

    def __init__(self, path: Path, keys: Mapping[str, Any], prefix: str = "") -> None:
        self.path = path
        self._keys = keys
        self._prefix = prefix

    def __contains__(self, name: str) -> bool:
        """True if the key is there and not null."""
        return self._keys.get(name) is not None

    def is_set(self, name: str) -> bool:
        """True if the key has a value that is not null, false, 0 or empty."""
        return bool(self._keys.get(name))

    def wrong(self, name: str, why: str) -> Exception:
        """Return the error for a key; `why` continues the sentence that the key's name begins."""
        return refusal(self.path, f"{self._prefix}{name} {why}")

    def section(self, name: str) -> Keys:
        """Return the keys of the object `name`; no keys if it is missing.

        Raises OutriderError for another value.
        """
        found = self._keys.get(name) or {}
        if not isinstance(found, Mapping):
            raise self.wrong(name, "must be an object")
        return Keys(self.path, found, f"{self._prefix}{name}.")

    def integer(
        self, name: str, default: int | None = None, least: int = 1, most: int = 2**31 - 1
    ) -> int:
        """Return a whole number from `least` to `most`.

        Raises OutriderError for another value, and for a missing key without a `default`.
        """
        value = self._keys.get(name)
        value = default if value is None else value
        if value is None:
            raise self.wrong(name, "is missing")
        if type(value) is not int or not least <= value <= most:
            why = f"must be a whole number from {least} to {most}, not {value!r}"
            raise self.wrong(name, why)
        return value

    def number(self, name: str, default: float | None = None, *, zero: bool = False) -> float:
        """Return a number above 0, or from 0 on with `zero`.

        Raises OutriderError for another value, and for a missing key without a `default`.
        """
        value = self._keys.get(name)
        value = default if value is None else value
        if value is None:
            raise self.wrong(name, "is missing")
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not (0 < value < 1e30 or (zero and value == 0)):
            which = "from 0 on" if zero else "above 0"
            raise self.wrong(name, f"must be a number {which}, not {value!r}")
        return value

    def flag(self, name: str, default: bool) -> bool:
        """Return a boolean. Raises OutriderError for another value."""
        value = self._keys.get(name)
        value = default if value is None else value
        if type(value) is not bool:
            raise self.wrong(name, f"must be true or false, not {value!r}")
        return value

    def text(self, name: str, default: str) -> str:
        """Return a string. Raises OutriderError for another value."""
        value = self._keys.get(name) or default
        if not isinstance(value, str):
            raise self.wrong(name, f"must be a text, not {value!r}")
        return value

    def ids(self, name: str) -> tuple[int, ...] | None:
        """Return whole numbers from 0 on; None if the key is missing.

        Raises OutriderError for another value.
        """
        value = self._keys.get(name)
        if value is None:
            return None
        if not isinstance(value, list) or any(type(i) is not int or i < 0 for i in value):
            raise self.wrong(name, f"must be a list of whole numbers from 0 on, not {value!r}")
        return tuple(value)

    def names(self, name: str) -> list[str]:
        """Return a list of strings; empty if the key is missing.

        Raises OutriderError for another value.
        """
        value = self._keys.get(name) or []
        if not isinstance(value, list) or any(not isinstance(part, str) for part in value):
            raise self.wrong(name, "must be a list of texts")
        return value


class Weights:
    """The tensors of a head's files.

    `take` moves a tensor to the normal form; no tensor may be left in the end.
    """

    def __init__(self, path: Path, tensors: dict[str, torch.Tensor]) -> None:
        self.path = path
        self._left = tensors
        self.taken: dict[str, torch.Tensor] = {}

    def __contains__(self, name: str) -> bool:
        """True if the files have a tensor of this name that was not taken yet."""
        return name in self._left

    @property
    def names(self) -> list[str]:
        """The names of the tensors that were not taken yet."""
        return sorted(self._left)

    def width(self, name: str) -> int:
        """Return the last dimension of a tensor [rows, columns].

        Raises OutriderError if the tensor is missing or is no matrix.
        """
        return self._matrix(name)[1]

    def rows(self, name: str) -> int:
        """Return the first dimension of a tensor [rows, columns].

        Raises OutriderError as `width` does.
        """
        return self._matrix(name)[0]

    def _matrix(self, name: str) -> torch.Size:
        if name not in self._left:
            raise refusal(self.path, f"the weights {name} are missing")
        shape = self._left[name].shape
        if len(shape) != 2:
            raise refusal(self.path, f"{name} has the shape {list(shape)}, which is no matrix")
        return shape

    def rename(self, change: Callable[[str], str]) -> None:
        """Give every tensor the name that `change` returns for its name."""
        self._left = {change(name): tensor for name, tensor in self._left.items()}

    def take(self, name: str, *shape: int, to: str | None = None) -> None:
        """Move a tensor of floats to the normal form, under the name `to` or its own name.

        Raises OutriderError if the tensor is missing, has another shape or type, or has numbers
        that are not finite.
        """
        self.taken[to or name] = self._pop(name, shape, _FLOATS)

    def take_if(self, name: str, *shape: int) -> bool:
        """Take the tensor under its own name if it is there; return whether it was there."""
        if name not in self._left:
            return False
        self.take(name, *shape)
        return True

    def ids(self, name: str, size: int) -> torch.Tensor | None:
        """Remove and return a tensor [size] of ids or flags; None if it is missing."""
        if name not in self._left:
            return None
        return self._pop(name, (size,), _IDS)

    def skip(self, *names: str) -> None:
        """Drop tensors that the head does not need, if they are there."""
        for name in names:
            self._left.pop(name, None)

    def finish(self) -> dict[str, torch.Tensor]:
        """Return the tensors that were taken. Raises OutriderError if a tensor was not taken."""
        if self._left:
            some = ", ".join(self.names[:4])
            more = "" if len(self._left) <= 4 else f" and {len(self._left) - 4} more"
            raise refusal(self.path, f"nothing in it reads the weights {some}{more}")
        return self.taken

    def _pop(
        self, name: str, shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...]
    ) -> torch.Tensor:
        tensor = self._left.pop(name, None)
        if tensor is None:
            raise refusal(self.path, f"the weights {name} are missing")
        if tensor.dtype not in dtypes:
            raise refusal(self.path, f"{name} is of the type {str(tensor.dtype)[6:]}")
        if tuple(tensor.shape) != shape:
            found, wanted = list(tensor.shape), list(shape)
            raise refusal(self.path, f"{name} has the shape {found}, not {wanted}")
        if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            raise refusal(self.path, f"{name} has numbers that are not finite")
        return tensor


def open_config(folder: Path) -> Keys:
    """Return the keys of a folder's config.json.

    Raises OutriderError(INVALID_VALUE) if the file is not readable, or if the head is quantised or
    has an adapter beside it.
    """
    path = folder / "config.json"
    try:
        keys = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as cause:
        raise refusal(folder, f"its config.json cannot be read ({cause})") from cause
    if not isinstance(keys, dict):
        raise refusal(path, "it must be an object")
    for name in ("adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"):
        if (folder / name).exists():
            why = f"{name} lies beside it, so it was trained for a target with that adapter"
            raise refusal(folder, why)
    for name in ("quantization_config", "compression_config"):
        if keys.get(name):
            raise refusal(path, f"{name} says that its weights are quantised; {BY_VLLM}")
    if (folder / "hf_quant_config.json").exists():
        raise refusal(folder, f"hf_quant_config.json says that it is quantised; {BY_VLLM}")
    return Keys(path, keys)


@contextmanager
def open_tensors(path: Path, field: str = "head") -> Iterator[Any]:
    """Open a safetensors file, as `safe_open` does.

    Raises OutriderError(INVALID_VALUE) that blames `field`.
    """
    try:
        with path.open("rb") as file:
            is_pointer = file.read(len(_LFS)) == _LFS
        if is_pointer:
            why = "it is a pointer of Git LFS; run `git lfs pull` in its folder to get the file"
            raise invalid(field, f"{path} cannot be read: {why}")
        with safe_open(path, framework="pt") as opened:
            yield opened
    except (OSError, SafetensorError) as cause:
        raise invalid(field, f"{path} cannot be read: {cause}") from cause


def read_index(path: Path, field: str = "head") -> dict[str, str]:
    """Read an index of safetensors files, which maps a tensor's name to its file.

    Raises OutriderError(INVALID_VALUE) that blames `field`, also if the index names a file in
    another folder.
    """
    try:
        places = json.loads(path.read_text())["weight_map"]
        files = set(places.values())
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as cause:
        raise invalid(field, f"{path} is no index of safetensors files") from cause
    for name in files:
        if not isinstance(name, str) or Path(name).name != name:
            raise invalid(field, f"{path} names {name!r:.100}, which is no file beside it")
    return dict(places)


def open_weights(folder: Path, wanted: Callable[[str], bool] = lambda name: True) -> Weights:
    """Read from a folder's safetensors files only the tensors whose names `wanted` accepts.

    Raises OutriderError(INVALID_VALUE), also for pickled files, which are never opened here.
    """
    if pickles := pickles_of(folder):
        why = (
            f"{pickles[0].name} is pickled; `outrider convert-head {folder} OUT` makes safetensors"
        )
        raise refusal(folder, why)
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise refusal(folder, "it has no file *.safetensors")
    _check_shards(folder)
    tensors: dict[str, torch.Tensor] = {}
    for path in files:
        with open_tensors(path) as file:
            for name in filter(wanted, file.keys()):
                if name in tensors:
                    raise refusal(folder, f"two of its files have the weights {name}")
                tensors[name] = file.get_tensor(name)
    for name, tensor in tensors.items():
        kind = str(tensor.dtype)[6:]
        if tensor.dtype is torch.float64:
            why = f"{name} is of the type float64; save it as float32, bfloat16 or float16"
            raise refusal(folder, why)
        if tensor.dtype not in (*_FLOATS, *_IDS):
            raise refusal(folder, f"{name} is quantised to {kind}; {BY_VLLM}")
    return Weights(folder, tensors)


def _check_shards(folder: Path) -> None:
    """Raise OutriderError if a file is missing that the folder's index names."""
    for index in sorted(folder.glob("*.safetensors.index.json")):
        files = sorted(set(read_index(index).values()))
        missing = next((name for name in files if not (folder / name).is_file()), None)
        if missing is not None:
            why = f"{missing} is missing, which {index.name} names; download the head again"
            raise refusal(folder, why)
