"""Parsers of other processes' bytes refuse an input or keep its meaning, guided by coverage."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

pytest.importorskip("atheris", reason="Atheris has packages for Linux on x86-64 alone")

PARSERS = ("request", "hello", "drafts", "step", "chunk", "model", "json")


RUNS = 50_000


def fuzz(parsers: Sequence[str], directory: Path) -> subprocess.CompletedProcess[str]:
    program = Path(__file__).with_name("parsers.py")
    flags = [f"-runs={RUNS}", "-seed=1", f"-artifact_prefix={directory}/"]
    command = [sys.executable, str(program), ",".join(parsers), str(directory / "inputs"), *flags]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)


def test_no_input_breaks_a_parser(tmp_path: Path) -> None:
    ended = fuzz(PARSERS, tmp_path)
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert ended.stderr.count(f"Done {RUNS} runs") == len(PARSERS)


def test_the_fuzzer_finds_a_planted_failure(tmp_path: Path) -> None:
    ended = fuzz(["planted"], tmp_path)
    assert ended.returncode != 0
    assert "AssertionError: planted" in ended.stderr + ended.stdout
