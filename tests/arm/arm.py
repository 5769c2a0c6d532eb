"""Processes of 64-bit ARM, which qemu emulates, in the root that `make-root.sh` makes."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.stack import ROOT

HERE = Path(__file__).parent
_MADE = ROOT / "build/arm64"
_TREE = _MADE / "root"
_MISSING = not (_MADE / "made").exists() or shutil.which("qemu-aarch64") is None
MARKS = [
    pytest.mark.slow,
    pytest.mark.skipif(_MISSING, reason="there is no root for ARM; run: make arm"),
    pytest.mark.timeout(3600),
]


def python(packages: Path) -> list[str]:
    """Return the command of ARM's Python, which imports Outrider from `packages` alone.

    The emulated processor, qemu's `max` with vectors of 128 bits, has all that a Neoverse V2 has,
    and more.
    """
    emulator = ["qemu-aarch64", "-cpu", "max,sve-max-vq=1", "-L", str(_TREE)]
    return [*emulator, "-E", f"PYTHONPATH={packages}", str(_TREE / "usr/bin/python3"), "-P"]
