"""Plants known bugs, one at a time, in a copy of the code, and reports which bugs the tests notice.

    python -m tests.mutants            # all of `tests/mutants/table.py`
    python -m tests.mutants A2 T3      # these

Prints which test notices each mutant. The exit status is 0 if all are noticed. A run takes minutes:
run this for a release, and after changes to files that mutants change.
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
    unnoticed = 0
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "outrider"
        shutil.copytree(ROOT, copy, ignore=_LEFT_OUT)
        (copy / "models").symlink_to(ROOT / "models")
        everything = dict.fromkeys(test for mutant in chosen for test in mutant.tests)
        if (failed := run(copy, everything)) is not None:
            print(f"without any mutant, this fails: {failed}", file=sys.stderr)
            return 2
        print("| mutant | planted bug | test that notices it |\n| --- | --- | --- |", flush=True)
        for mutant in chosen:
            killer = planted(copy, mutant)
            unnoticed += killer is None
            verdict = f"`{killer}`" if killer else "**nothing**"
            print(f"| {mutant.name} | {mutant.what} | {verdict} |", flush=True)
    print(f"{len(chosen)} mutants, {unnoticed} unnoticed", file=sys.stderr)
    return min(unnoticed, 1)


def planted(copy: Path, mutant: Mutant) -> str | None:
    """Plant a mutant and return the name of the test that notices it; None if all pass."""
    path = copy / mutant.path
    source = path.read_text()
    path.write_text(mutant.applied(source))
    try:
        return run(copy, mutant.tests)
    finally:
        path.write_text(source)


def run(copy: Path, tests: Iterable[str]) -> str | None:
    """Return the first test that fails in the copy, or why the run ended; None if all pass."""
    options = ["-x", "-q", "-p", "no:cacheprovider", "-m", "not slow"]
    command = [sys.executable, "-m", "pytest", *options, *tests]
    environment = {**os.environ, "PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(
            command, cwd=copy, env=environment, capture_output=True, text=True, timeout=_LONGEST_S
        )
    except subprocess.TimeoutExpired:
        return f"no end within {_LONGEST_S} s"
    if done.returncode == 0:
        return None
    if done.returncode < 0:
        return f"signal {-done.returncode} ends the tests"
    failed = re.search(r"^(?:FAILED|ERROR) \S+::(test_\w+)", done.stdout, re.MULTILINE)
    if failed is None:
        raise RuntimeError(f"pytest ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return failed[1]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
