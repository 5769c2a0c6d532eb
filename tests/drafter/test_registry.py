"""Families are found by name or class, and each defines its own settings."""

from __future__ import annotations

import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from drafter_svc.__main__ import read_settings
from drafter_svc.config import DrafterSettings, required_setting, settings_schema
from drafter_svc.families import registry
from drafter_svc.families.base import Family
from drafter_svc.families.ngram import NgramFamily
from drafter_svc.families.registry import find_family, known_families
from examples.repeat_drafter import RepeatFamily
from outrider.errors import OutriderError
from outrider_cli.drafter_spec import DrafterSpec

ROOT = Path(__file__).parents[2]
REPEAT = "examples.repeat_drafter:RepeatFamily"


@pytest.mark.parametrize("name", known_families())
def test_every_named_family_has_that_name(name: str) -> None:
    family = find_family(name)
    assert issubclass(family, Family)
    assert family.name == name
    assert all(info.description for info in family.settings.model_fields.values())


def test_a_family_may_be_named_by_its_class_or_by_an_entry_point(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert find_family(REPEAT) is RepeatFamily
    with pytest.raises(OutriderError, match=f"must be {', '.join(known_families())} or package"):
        find_family("repeat")

    def entry_points(group: str) -> list[EntryPoint]:
        return [EntryPoint("repeat", REPEAT, group), EntryPoint("ngram", REPEAT, group)]

    monkeypatch.setattr(registry, "entry_points", entry_points)
    assert find_family("repeat") is RepeatFamily
    assert find_family("ngram") is NgramFamily


def test_a_drafter_has_the_settings_of_its_family_and_no_others() -> None:
    common = set(DrafterSettings.model_fields)
    for name in (*known_families(), REPEAT):
        schema = settings_schema(name)
        own = set(find_family(name).settings.model_fields)
        assert set(schema.model_fields) == common | own
        assert not common & own
        assert schema.model_config["env_prefix"] == "OUTRIDER_DRAFTER_"
        assert required_setting(schema) == (name if name in ("model", "head") else None)


def test_outrider_serve_takes_a_family_by_its_class_with_its_settings() -> None:
    spec = DrafterSpec.parse(f"{REPEAT},match-tokens=3,cores=0,2")
    assert (spec.family, spec.options) == (REPEAT, {"match_tokens": "3", "cores": "0,2"})
    assert not spec.runs_model


@pytest.mark.parametrize(
    ("family", "flag", "others"),
    [(REPEAT, "--match-tokens", "--page-count"), ("model", "--page-count", "--redis")],
)
def test_help_shows_the_settings_of_the_chosen_family(
    family: str, flag: str, others: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        read_settings(["--family", family, "--help"], "drafter")
    shown = capsys.readouterr().out
    assert not ended.value.code
    assert flag in shown
    assert "--verifier" in shown
    assert others not in shown


def test_a_class_in_the_working_directory_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "of_mine.py").write_text((ROOT / "examples/repeat_drafter.py").read_text())
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    assert find_family("of_mine:RepeatFamily").name == "repeat"
