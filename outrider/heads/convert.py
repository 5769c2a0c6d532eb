"""`outrider convert-head`: converts a head's pickled files to safetensors.

A pickle can run code. torch's restricted reader refuses such code, but the reader is large, so it
works in a process of its own with bounded memory and time. This module does not load torch.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path

from outrider.errors import OutriderError, Reason
from outrider.tokenizer import check_model_folder

PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
# Files that training leaves in a folder beside the weights.
_OF_TRAINING = (
    "training_args.*",
    "training_state*",
    "optimizer*",
    "scheduler*",
    "scaler*",
    "rng_state*",
    "random_states*",
)
# The name, without suffix, of a pickled file whose tensor is in no other file of the folder.
_MASK = "mask_embedding"
_SECONDS = 600


def pickles_of(folder: Path) -> list[Path]:
    """Return the pickled files in a head's folder whose weights are in no safetensors file.

    Files left over from training have no weights of the head. Other pickled files beside
    safetensors are copies, except MiMo's mask_embedding.pt.
    """
    found = sorted({path for pattern in PICKLES for path in folder.glob(pattern)})
    pickles = [path for path in found if not _is_of_training(path.name)]
    safe = {path.stem for path in folder.glob("*.safetensors")}
    if not safe:
        return pickles
    return [path for path in pickles if path.stem == _MASK and _MASK not in safe]


def _is_of_training(name: str) -> bool:
    return any(fnmatch(name, pattern) for pattern in _OF_TRAINING)


def run(source: Path, target: Path, *, seconds: float = _SECONDS) -> int:
    """Write a head's config.json, and its weights as safetensors, to a new folder.

    Return the exit status 0. The folder `target` must not exist yet. Raises
    OutriderError(INVALID_VALUE) that names the folder that cannot be converted, or the file that
    cannot be read as tensors; then no new folder is left.
    """
    check_model_folder(str(source))
    if not (source / "config.json").is_file():
        raise _refusal(source, "it has no config.json")
    if target.exists():
        raise _refusal(target, "it exists already")
    pickles = pickles_of(source)
    if not pickles and any(source.glob("*.safetensors")):
        raise _refusal(source, "its weights are in safetensors files already; use it as it is")
    if not pickles:
        raise _refusal(source, f"it has none of the files {', '.join(PICKLES)}")
    target.mkdir(parents=True)
    try:
        for path in pickles:
            _convert(path, target / f"{path.stem}.safetensors", seconds)
        for path in [*source.glob("config.json"), *source.glob("*.safetensors")]:
            shutil.copyfile(path, target / path.name)
    except BaseException:
        shutil.rmtree(target)
        raise
    for path in sorted(target.iterdir()):
        print(path)
    return 0


def _convert(path: Path, out: Path, seconds: float) -> None:
    """Convert one file in a process of its own."""
    command = [sys.executable, "-m", "outrider.heads.unpickle", str(path), str(out)]
    try:
        ended = subprocess.run(
            command, capture_output=True, text=True, timeout=seconds, check=False
        )
    except subprocess.TimeoutExpired as cause:
        raise _refusal(path, f"reading it took more than {seconds:g} s") from cause
    if ended.returncode:
        lines = ended.stderr.strip().splitlines() or [f"its reader ended with {ended.returncode}"]
        raise _refusal(path, lines[-1])


def _refusal(path: Path, why: str) -> OutriderError:
    return OutriderError(Reason.INVALID_VALUE, f"{path} cannot be converted: {why}", "head")
