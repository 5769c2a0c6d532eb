"""`outrider --version` says what runs: the commit, the compiled kernels, the installed extras."""

from __future__ import annotations

import subprocess
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest

from outrider import __version__
from outrider_cli import version

ROOT = Path(__file__).parents[2]

REQUIRES = [
    "click>=8",
    'torch>=2.11; extra == "models"',
    'gguf>=0.17; extra == "gguf"',
    'outrider[gguf,models]; extra == "bench"',
    'outrider[models]; extra == "light"',
]


class Metadata:
    """The metadata of an installed package."""

    def __init__(self, installed: str) -> None:
        self.version = installed
        self.requires = REQUIRES
        self.metadata = self

    def get_all(self, _: str) -> list[str]:
        return ["models", "gguf", "bench", "light"]


def install(monkeypatch: pytest.MonkeyPatch, **versions: str) -> None:
    """Let it seem that only these packages are installed besides Outrider."""

    def distribution(name: str) -> Any:
        if name not in versions and name != "outrider":
            raise PackageNotFoundError(name)
        return Metadata(versions.get(name, "1"))

    monkeypatch.setattr(version, "distribution", distribution)


@pytest.mark.parametrize(
    ("versions", "extras"),
    [
        ({}, []),
        ({"gguf": "0.17"}, ["gguf"]),
        ({"torch": "2.13.0+cpu"}, ["light", "models"]),
        ({"torch": "2.10", "gguf": "0.17"}, ["gguf"]),
        ({"torch": "2.13", "gguf": "1"}, ["bench", "gguf", "light", "models"]),
    ],
)
def test_an_extra_is_named_if_every_package_of_it_is_installed(
    versions: dict[str, str], extras: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, **versions)
    assert version.extras() == extras


def test_a_checkout_names_its_commit() -> None:
    head = ["git", "rev-parse", "HEAD"]
    full = subprocess.run(head, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert version.commit().removesuffix("-dirty") == full[:12]


def test_a_build_names_the_commit_that_was_written_into_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(version, "_PACKAGE", tmp_path / "outrider")
    (tmp_path / "outrider").mkdir()
    assert version.commit() == "unknown"
    (tmp_path / "outrider/commit.txt").write_text("0123456789ab\n")
    assert version.commit() == "0123456789ab"


def test_the_kernels_are_those_that_this_interpreter_can_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(version, "_PACKAGE", tmp_path)
    (tmp_path / "lm/cpu").mkdir(parents=True)
    assert version.kernels() == []
    for name in ("_cpu.so", "_cpu_avx2.so", "_cpu_amx.cpython-39-x86_64-linux-gnu.so"):
        (tmp_path / "lm/cpu" / name).touch()
    assert version.kernels() == ["avx2", "default"]


def test_the_lines_begin_with_the_version() -> None:
    assert version.described().startswith(f"outrider {__version__}\ncommit: ")
