"""Asks a database of advisories about pinned packages, and says what was not audited.

`audit.py PIP_AUDIT FILE...` exits with 1 if an advisory concerns a package of the files. If the
database does not answer, or does not know a package, the script prints "NOT AUDITED"; this does not
change its exit status. pip-audit itself would only say that it found nothing.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_SHOWN = 5


@dataclass(frozen=True, slots=True)
class Verdict:
    """The lines of text that an audit prints, and its exit status."""

    lines: list[str]
    status: int


def verdict(report: dict[str, Any]) -> Verdict:
    """Make a verdict of pip-audit's report, which is parsed JSON."""
    packages = report["dependencies"]
    skipped = [package["name"] for package in packages if "skip_reason" in package]
    lines = []
    for package in packages:
        for advisory in package.get("vulns", []):
            fixed = ", ".join(advisory["fix_versions"]) or "no version"
            name = f"{package['name']} {package['version']}"
            lines.append(f"{name}: {advisory['id']}, fixed by {fixed}")
    status = int(bool(lines))
    audited = len(packages) - len(skipped)
    lines.append(f"{audited} of {len(packages)} packages were audited")
    if skipped or not packages:
        names = ", ".join(skipped[:_SHOWN]) + (", ..." if len(skipped) > _SHOWN else "")
        lines.append(f"NOT AUDITED: {len(skipped)} packages that the database lacks: {names}")
    return Verdict(lines, status)


def pins(text: str) -> list[str]:
    """The packages and versions that a file of requirements pins, without their hashes."""
    lines = (line.rstrip(" \\") for line in text.splitlines())
    return [line for line in lines if line and not line.startswith((" ", "#"))]


def audit(command: Sequence[str]) -> Verdict:
    """Run pip-audit, and read its report."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    try:
        return verdict(json.loads(done.stdout))
    except json.JSONDecodeError:
        last = (done.stderr.strip() or "no reason given").splitlines()[-1]
        return Verdict([f"NOT AUDITED: pip-audit gave no report: {last}"], 0)


def main(pip_audit: str, *files: str) -> int:
    """Audit the files, print the verdict, and return the exit status."""
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as asked:
        # pip-audit takes hashes for all packages or for none, and torch has no hash.
        lines = {line for file in files for line in pins(Path(file).read_text())}
        asked.write("\n".join(sorted(lines)))
        asked.flush()
        command = [pip_audit, "--format", "json", "--progress-spinner", "off", "--timeout", "20"]
        command += ["--disable-pip", "--no-deps", "--requirement", asked.name]
        found = audit(command)
    print(*found.lines, sep="\n")
    return found.status


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))
