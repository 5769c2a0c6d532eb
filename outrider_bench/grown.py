"""Makes grown targets of any shape and heads for them, and keeps both for later runs."""

from __future__ import annotations

from dataclasses import astuple
from pathlib import Path

from outrider_bench.grow import MODEST, Shape, grow_head, make_checkpoint

LARGE = Shape(hidden=1280, layers=24, heads=20, kv_heads=4, intermediate=3456)
"""418 M parameters."""


def grown_checkpoint(small: Path, directory: Path, shape: Shape, dtype: str) -> Path:
    """Return the path of the grown checkpoint, which is in `directory` and has its tokenizer.

    The function makes the checkpoint on first use.
    """
    sizes = "x".join(str(size) for size in astuple(shape) if size)
    out = directory / f"{small.name}-{sizes}-{dtype}"
    if not out.is_dir():
        make_checkpoint(small, out, shape, dtype)
    return out


def modest_target(small: Path, dtype: str) -> Path:
    """Return the path of the target for experiments: `small`, grown to 154 M parameters.

    The function makes the checkpoint on first use.
    """
    return grown_checkpoint(small, Path("bench/out"), MODEST, dtype)


def grown_head(head: Path, small: Path, large: Path) -> Path:
    """Return the path of a head of the target `small`, grown for `large`.

    The function writes the grown head to a folder beside the folder `large`.
    """
    out = large.with_name(f"{large.name}-{head.name}")
    grow_head(head, small, large, out)
    return out
