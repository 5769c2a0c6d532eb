"""Targets that are grown to any shape and kept for later runs."""

from __future__ import annotations

from dataclasses import astuple
from pathlib import Path

from outrider.launch.grow import Shape, make_checkpoint


def grown_checkpoint(small: Path, directory: Path, shape: Shape, dtype: str) -> Path:
    """Path of the grown checkpoint with its tokenizer, in `directory`; it is made on first use."""
    sizes = "x".join(str(size) for size in astuple(shape) if size)
    out = directory / f"{small.name}-{sizes}-{dtype}"
    if not out.is_dir():
        make_checkpoint(small, out, shape, dtype)
    return out
