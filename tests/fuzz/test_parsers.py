"""Parsers of other processes' bytes refuse an input or keep its meaning, guided by coverage."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("atheris", reason="Atheris has packages for Linux on x86-64 alone")

PARSERS = ("request", "hello", "drafts", "step", "model", "json")


def fuzz(parser: str, runs: int, directory: Path) -> subprocess.CompletedProcess[str]:
    program = Path(__file__).with_name("parsers.py")
    flags = [f"-runs={runs}", "-seed=1", f"-artifact_prefix={directory}/"]
    command = [sys.executable, str(program), parser, *flags]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)


@pytest.mark.parametrize("parser", PARSERS)
def test_no_input_breaks_a_parser(parser: str, tmp_path: Path) -> None:
    ended = fuzz(parser, 50_000, tmp_path)
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert "Done 50000 runs" in ended.stderr


def test_the_fuzzer_finds_a_planted_failure(tmp_path: Path) -> None:
    ended = fuzz("planted", 50_000, tmp_path)
    assert ended.returncode != 0
    assert "AssertionError: planted" in ended.stderr + ended.stdout
