"""Processes of 64-bit ARM, which qemu emulates, in the root that `make-root.sh` makes."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from outrider.protocol.messages import SamplingParams, SpeculationOptions
from tests.stack import ROOT, Answers, Client, prompts

HERE = Path(__file__).parent
_MADE = ROOT / "build/arm64"
_TREE = _MADE / "root"
_MISSING = not (_MADE / "made").exists() or shutil.which("qemu-aarch64") is None
MARKS = [
    pytest.mark.slow,
    pytest.mark.skipif(_MISSING, reason="there is no root for ARM; run: make arm"),
    pytest.mark.timeout(3600),
]

PLAIN = SpeculationOptions(enabled=False)
# Each request has its own seed, so that requests with equal prompts differ.
SAMPLINGS = {
    "greedy": SamplingParams(temperature=0.0),
    "seeded": SamplingParams(1.0, seed=7),
    "seeded, truncated": SamplingParams(0.8, 40, 0.95, repetition_penalty=1.1, seed=8),
}


def python(packages: Path) -> list[str]:
    """Return the command of ARM's Python, which imports Outrider from `packages` alone.

    The emulated processor, qemu's `max` with vectors of 128 bits, has all that a Neoverse V2 has,
    and more.
    """
    emulator = ["qemu-aarch64", "-cpu", "max,sve-max-vq=1", "-L", str(_TREE)]
    return [*emulator, "-E", f"PYTHONPATH={packages}", str(_TREE / "usr/bin/python3"), "-P"]


async def equal_texts(client: Client, sampling: SamplingParams) -> Answers:
    """Return the answers with drafts; check that their texts equal the texts of plain decoding."""
    asked = prompts(every=4)
    plain = await client.answers(asked, sampling, PLAIN, 24, at_once=2)
    drafted = await client.answers(asked, sampling, SpeculationOptions(), 24, at_once=2)
    assert plain.draft_token_count == 0
    assert drafted.texts == plain.texts
    assert len({tuple(text) for text in plain.texts}) == len(asked)
    return drafted
