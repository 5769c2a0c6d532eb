"""`outrider` finds commands of other packages through the entry-point group."""

import sys
import tomllib
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path
from types import SimpleNamespace

import pytest

from outrider.process.settings.usage import invoke
from outrider_cli import main as cli

ROOT = Path(__file__).parents[2]


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> list[EntryPoint]:
    """Return the entry points that the command finds."""
    points: list[EntryPoint] = []
    monkeypatch.setattr(cli, "entry_points", lambda **wanted: EntryPoints(points).select(**wanted))
    return points


def point(name: str, value: str) -> EntryPoint:
    return EntryPoint(name, value, "outrider.commands")


def test_a_command_gets_its_arguments_and_returns_its_status(
    installed: list[EntryPoint], monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[list[str]] = []

    def main(arguments: list[str]) -> int:
        given.append(arguments)
        return 3

    monkeypatch.setitem(sys.modules, "elsewhere", SimpleNamespace(main=main))
    installed += [point("run", "elsewhere:main")]
    assert invoke(cli.app, "outrider", ["lab", "run", "a.yaml", "--help"]) == 3
    assert given == [["a.yaml", "--help"]]


@pytest.mark.parametrize(
    ("points", "problem"),
    [
        ([], "the command is not installed"),
        ([point("bench", "no_such_package:main")], "No module named 'no_such_package'"),
    ],
)
def test_a_command_that_is_not_installed_names_its_extra(
    points: list[EntryPoint],
    problem: str,
    installed: list[EntryPoint],
    capsys: pytest.CaptureFixture[str],
) -> None:
    installed += points
    with pytest.raises(SystemExit) as caught:
        invoke(cli.app, "outrider", ["lab", "bench", "--only", "host"])
    assert caught.value.code == 2
    hint = "in Outrider's sources, pip install '.[bench]'"
    assert capsys.readouterr().err == f"outrider lab bench: {problem}; {hint}\n"


def test_every_extension_command_has_an_entry_point_and_a_help_text() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert set(cli._LAB) == set(project["entry-points"]["outrider.commands"])
