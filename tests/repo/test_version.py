"""`outrider.__version__` is the version; files that cannot import it repeat the same version."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

import pytest

from outrider import __version__

ROOT = Path(__file__).parents[2]


def found(file: str, pattern: str) -> set[str]:
    """Return what a pattern's group finds in a file; the pattern must match at least once."""
    versions = set(re.findall(pattern, (ROOT / file).read_text(), re.MULTILINE))
    assert versions
    return versions


@pytest.mark.parametrize(
    ("file", "pattern"),
    [
        ("CHANGELOG.md", r"\A# Changelog\n\n## (\S+)"),
        ("clients/README.md", r"outrider\.dev/go@v(\S+)"),
    ],
)
def test_files_that_cannot_read_the_version_have_the_same(file: str, pattern: str) -> None:
    assert found(file, pattern) == {__version__}


def test_the_protocol_of_this_version_is_frozen() -> None:
    released = ROOT / "protos/released" / __version__.rpartition(".")[0]
    assert (released / "outrider.v1.binpb").is_file()


def test_packages_take_the_version_or_have_the_same() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert project["project"]["dynamic"] == ["version"]
    assert project["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "outrider.__version__"}
    package = json.loads((ROOT / "clients/typescript/drafter/package.json").read_text())
    assert package["version"] == __version__
