"""Processes of 64-bit ARM, which qemu emulates, in the root that `make-root.sh` makes."""

from __future__ import annotations

from pathlib import Path

from tests.stack import ROOT

MADE = ROOT / "build/arm64"
TREE = MADE / "root"
MISSING = "there is no root for ARM; run: make arm"


def python(packages: Path = ROOT) -> list[str]:
    """The command of ARM's Python, which imports Outrider from `packages`.

    The processor has what Neoverse V2 has and more: `max` with its vectors of 128 bits.
    """
    emulator = ["qemu-aarch64", "-cpu", "max,sve-max-vq=1", "-L", str(TREE)]
    return [*emulator, "-E", f"PYTHONPATH={packages}", str(TREE / "usr/bin/python3")]
