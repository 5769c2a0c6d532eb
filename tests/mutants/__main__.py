"""Plants known bugs, one at a time, in a copy of the code, and says which of them the tests notice.

    python -m tests.mutants            # all of `tests/mutants/table.py`
    python -m tests.mutants A2 J2      # these

Prints a table as docs/losslessness.md has it. The exit status is 1 unless each mutant is killed, but for those that change
nothing (`Mutant.equivalent`), which have to survive. For a release, and for whoever changes what is planted in: it takes minutes.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

from tests.mutants.mutant import Mutant
from tests.mutants.table import MUTANTS

ROOT = Path(__file__).parents[2]
_LONGEST_S = 600
_LEFT_OUT = shutil.ignore_patterns(
    ".git", ".venv", "__pycache__", ".*_cache", ".hypothesis", "models", "build", "*.egg-info"
)


def main(names: list[str]) -> int:
    if unknown := set(names) - {mutant.name for mutant in MUTANTS}:
        print(f"no such mutant: {', '.join(sorted(unknown))}", file=sys.stderr)
        return 2
    chosen = [mutant for mutant in MUTANTS if not names or mutant.name in names]
    wrong = 0
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "outrider"
        shutil.copytree(ROOT, copy, ignore=_LEFT_OUT)
        (copy / "models").symlink_to(ROOT / "models")
        everything = dict.fromkeys(test for mutant in chosen for test in mutant.tests)
        if (failed := run(copy, everything)) is not None:
            print(f"without any mutant, this fails: {failed}", file=sys.stderr)
            return 2
        print("| mutant | what is planted | what notices it |\n| --- | --- | --- |", flush=True)
        for mutant in chosen:
            killer = planted(copy, mutant)
            wrong += (killer is None) != bool(mutant.equivalent)
            print(f"| {mutant.name} | {mutant.what} | {verdict(mutant, killer)} |", flush=True)
    print(f"{len(chosen)} mutants, {wrong} not as they should be", file=sys.stderr)
    return min(wrong, 1)


def verdict(mutant: Mutant, killer: str | None) -> str:
    """What the table says of a mutant that this test noticed, or none."""
    if killer is None:
        return f"nothing: {mutant.equivalent}" if mutant.equivalent else "**nothing**"
    return (
        f"`{killer}`"
        if not mutant.equivalent
        else f"`{killer}`, **though it should change nothing**"
    )


def planted(copy: Path, mutant: Mutant) -> str | None:
    """The test that notices a mutant; None if all pass."""
    path = copy / mutant.path
    source = path.read_text()
    path.write_text(mutant.applied(source))
    try:
        return run(copy, mutant.tests)
    finally:
        path.write_text(source)


def run(copy: Path, tests: Iterable[str]) -> str | None:
    """The first test that fails in the copy, if any does."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-x",
        "-q",
        "-p",
        "no:cacheprovider",
        "-m",
        "not slow",
        *tests,
    ]
    environment = {**os.environ, "PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(
            command, cwd=copy, env=environment, capture_output=True, text=True, timeout=_LONGEST_S
        )
    except subprocess.TimeoutExpired:
        return f"no end within {_LONGEST_S} s"
    if done.returncode == 0:
        return None
    failed = re.search(r"^(?:FAILED|ERROR) \S+::(test_\w+)", done.stdout, re.MULTILINE)
    if failed is None:
        raise RuntimeError(f"pytest ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return failed[1]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
