"""The images' packages are pinned with hashes, and an audit that got no report says so."""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from compose.audit import audit, pins, verdict

ROOT = Path(__file__).parents[2]
PINNED = ROOT / "compose/pinned"

FILES = ("light", "heavy", "build")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
BASE = PROJECT["project"]["dependencies"]
# This package's build depends on the index.
WITHOUT_HASH = {"torch"}
WANTED = {
    "light": BASE,
    "heavy": [*BASE, *PROJECT["project"]["optional-dependencies"]["models"]],
    "build": PROJECT["build-system"]["requires"],
}


def pinned(name: str) -> dict[str, list[str]]:
    """Return the versions of each package in a file; several if they depend on Python's version."""
    found: dict[str, list[str]] = {}
    for line in pins((PINNED / f"{name}.txt").read_text()):
        requirement = Requirement(line)
        [version] = requirement.specifier
        assert version.operator == "=="
        found.setdefault(canonicalize_name(requirement.name), []).append(version.version)
    return found


@pytest.mark.parametrize("name", FILES)
def test_every_package_is_pinned_by_hashes_and_no_address(name: str) -> None:
    text = (PINNED / f"{name}.txt").read_text()
    assert "://" not in text
    for block in re.split(r"\n(?! )", text.strip()):
        assert "--hash=sha256:" in block, block


@pytest.mark.parametrize("name", FILES)
def test_the_pinned_versions_are_those_that_the_project_wants(name: str) -> None:
    """If this fails after a change of pyproject.toml, run `make pinned`."""
    found = pinned(name)
    for wanted in map(Requirement, WANTED[name]):
        if wanted.name in WITHOUT_HASH:
            continue
        versions = found[canonicalize_name(wanted.name)]
        assert any(version in wanted.specifier for version in versions), (wanted, versions)


def test_both_kinds_of_images_have_the_same_versions() -> None:
    light, heavy = pinned("light"), pinned("heavy")
    assert {name: versions for name, versions in light.items() if heavy.get(name) != versions} == {}


def test_only_torch_is_installed_without_a_hash() -> None:
    text = (ROOT / "compose/Dockerfile").read_text().replace("\\\n", " ")
    lines = [line for line in re.findall(r"pip install .*", text) if "--no-index" not in line]
    assert len(lines) == 4
    [unchecked] = [line for line in lines if "--require-hashes" not in line]
    assert re.fullmatch(r"pip install --quiet -c \S+ torch && pip check", unchecked)


def package(name: str, **more: Any) -> dict[str, Any]:
    return {"name": name, "version": "1", "vulns": [], **more}


SKIPPED = {"name": "far", "skip_reason": "not found"}
BAD = package("bad", vulns=[{"id": "CVE-1", "fix_versions": ["2"]}])


@pytest.mark.parametrize(
    ("packages", "said"),
    [
        ([package("one"), package("two")], "2 of 2 packages were audited"),
        ([], "NOT AUDITED: 0 packages"),
        ([package("one"), SKIPPED], "NOT AUDITED: 1 packages that the database lacks: far"),
    ],
)
def test_an_audit_names_each_package_that_was_not_audited(
    packages: list[dict[str, Any]], said: str
) -> None:
    found = verdict({"dependencies": packages})
    assert any(line.startswith(said) for line in found.lines)
    assert found.status == 0


def test_an_advisory_fails_the_audit_and_is_named() -> None:
    found = verdict({"dependencies": [BAD, SKIPPED]})
    assert found.status == 1
    assert found.lines[0] == "bad 1: CVE-1, fixed by 2"


def test_an_audit_without_a_report_says_why() -> None:
    found = audit([sys.executable, "-c", "raise SystemExit('no route to the database')"])
    assert found.lines == ["NOT AUDITED: pip-audit gave no report: no route to the database"]
    assert found.status == 0


def images() -> dict[str, str]:
    """Return the third-party images in the files of `compose`, keyed by file and place."""
    found: dict[str, str] = {}
    for path in sorted((ROOT / "compose").rglob("*")):
        if path.suffix not in (".yaml", ".sh") and path.name != "Dockerfile":
            continue
        text = path.read_text()
        named = re.findall(r"image: [\"']?(\S+?)[\"']?$", text, re.MULTILINE)
        named += re.findall(r"(?:ARG BASE=|BASE:-|_IMAGE:-)([^\s}]+)", text)
        named += [match[1] for match in re.finditer(r"^FROM (?!\$)(\S+:\S+)", text, re.MULTILINE)]
        pairs = re.findall(r"\{name: (\S+), (?:newTag|digest): (\S+)\}", text)
        named += [f"{name}:{tag}" for name, tag in pairs]
        for image in named:
            # Kustomize gives tags to the plain names of its manifests.
            if "outrider-" not in image and ":" in image and not image.startswith("${"):
                found[f"{path.name}: {image}"] = image
    return found


def test_no_image_of_others_has_a_floating_tag() -> None:
    """A tag such as redis:7 may be another program tomorrow."""
    exact = re.compile(r"(:v?\d+\.\d+\.\d+([-.][\w.-]+)?|@sha256:[0-9a-f]{64})$")
    found = images()
    assert len(found) >= 10
    assert [place for place, image in found.items() if not exact.search(image)] == []
    kustomized = yaml.safe_load((ROOT / "compose/kubernetes/base/kustomization.yaml").read_text())
    tagged = {each["name"] for each in kustomized["images"]}
    manifests = (ROOT / "compose/kubernetes/base").glob("*.yaml")
    plain = {name for path in manifests for name in re.findall(r"image: (\S+)", path.read_text())}
    assert plain == tagged
