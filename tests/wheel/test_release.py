"""A release can be built again with the same bytes, and its wheels work without the checkout."""

from __future__ import annotations

import hashlib
import json
import platform
import re
import shutil
import subprocess
import tarfile
from pathlib import Path
from zipfile import ZipFile

import httpx
import pytest

from outrider import __version__
from tests.serving import serving
from tests.wheel.conftest import ROOT, environment, install, release, run

# The first test builds two releases, on one core of a busy machine.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

ADDED_BY_A_KEY = {"SHA256SUMS.sig"}


def digests(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of each file, by its name."""
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


def wheel(folder: Path, name: str) -> Path:
    """Return the release's wheel of a package."""
    [found] = folder.glob(f"{name}-{__version__}-*.whl")
    return found


def test_another_clone_gives_the_same_bytes_and_a_key_signs_them(
    released: Path, tmp_path: Path
) -> None:
    key = tmp_path / "key"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key)], check=True)
    again = release(tmp_path / "again", SIGNING_KEY=str(key))
    first, second = digests(released), digests(again)
    assert {name: second.pop(name) for name in ADDED_BY_A_KEY}
    assert first == second
    lines = (again / "SHA256SUMS").read_text().splitlines()
    listed = {name: digest for digest, name in (line.split("  ") for line in lines)}
    assert listed == {name: digest for name, digest in first.items() if name != "SHA256SUMS"}
    signers = tmp_path / "signers"
    signers.write_text(f"release {key.with_suffix('.pub').read_text()}")
    verify = ["ssh-keygen", "-Y", "verify", "-f", str(signers), "-I", "release", "-n", "file"]
    verify += ["-s", str(again / "SHA256SUMS.sig")]
    sums = (again / "SHA256SUMS").read_bytes()
    assert subprocess.run(verify, input=sums, check=False).returncode == 0
    assert subprocess.run(verify, input=sums + b"x", check=False).returncode != 0


def test_the_wheel_names_its_platform_and_holds_kernels_and_step(released: Path) -> None:
    built = wheel(released, "outrider")
    machine = platform.machine()
    assert re.search(rf"-cp3\d+-cp3\d+-manylinux\S+_{machine}\.whl$", built.name), built.name
    names = ZipFile(built).namelist()
    assert any(re.match(r"outrider/lm/cpu/_cpu\.cpython-.*\.so", name) for name in names)
    assert any(re.match(r"verifier_svc/engine/loop\.cpython-.*\.so", name) for name in names)
    assert {name.partition("/")[0] for name in names}.isdisjoint({"tests", "bench", "models"})


def test_notes_and_packages_are_listed(released: Path) -> None:
    assert (released / "NOTES.md").read_text().strip() in (ROOT / "CHANGELOG.md").read_text()
    packages = json.loads((released / f"outrider-{__version__}.cdx.json").read_text())
    assert packages["bomFormat"] == "CycloneDX"
    described = packages["metadata"]["component"]
    assert (described["name"], described["version"]) == ("outrider", __version__)
    named = {package["name"]: package for package in packages["components"]}
    assert {"grpcio", "torch", "transformers"} <= named.keys()
    assert named["grpcio"]["purl"].startswith("pkg:pypi/grpcio@")


def test_the_archive_of_the_sources_has_what_the_images_copy(released: Path) -> None:
    with tarfile.open(released / f"outrider-{__version__}.tar.gz") as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    kept = (ROOT / ".dockerignore").read_text().splitlines()
    listed = subprocess.run(
        ["git", "ls-files", *(name[1:] for name in kept if name.startswith("!"))],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    assert {"compose/Dockerfile", ".dockerignore", *listed} - names == set()


def test_the_wheel_answers_away_from_the_checkout(released: Path, tmp_path: Path) -> None:
    python = environment(tmp_path / "venv", wheel(released, "outrider"))
    outrider = str(python.parent / "outrider")
    head = run(["git", "rev-parse", "HEAD"], ROOT).stdout
    shown = run([outrider, "--version"], tmp_path).stdout
    assert shown.startswith(f"outrider {__version__}\ncommit: {head[:12]}\nCPU kernels: ")
    assert "compiled step: yes" in shown
    shutil.copytree(ROOT / "models/target", tmp_path / "target")
    flags = ("--target", str(tmp_path / "target"), "--drafter", "ngram", "--model-name", "small")
    log = tmp_path / "log"
    with serving(log, *flags, program=(outrider,), at=tmp_path) as (_, url):
        body = {"model": "small", "prompt": "def main(", "max_tokens": 8, "temperature": 0}
        answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60)
        assert answer.json()["usage"]["completion_tokens"] == 8
        page = httpx.get(url, timeout=60)
        assert page.status_code == 200
    planted = run([str(python), "-c", "import outrider"], tmp_path, PYTHONPATH=str(ROOT))
    assert "is of the checkout" in planted.stderr


CALLS = """
import sys

import client

client.check_texts(client.stub(sys.argv[1], ""))
client.check_services(client.dial(sys.argv[1], ""))
import outrider

assert outrider.__file__ is None, outrider
assert "torch" not in sys.modules
"""


def test_a_client_needs_only_the_package_of_the_protos(released: Path, tmp_path: Path) -> None:
    protos = wheel(released, "outrider_protos")
    assert protos.name.endswith("-py3-none-any.whl")
    names = [Path(name) for name in ZipFile(protos).namelist()]
    sources = {path.name for path in (ROOT / "protos/outrider/v1").iterdir()}
    assert sources <= {path.name for path in names}
    python = environment(tmp_path / "venv", protos)
    shutil.copy(ROOT / "clients/python/client/client.py", tmp_path)
    with serving(tmp_path / "log", "--target", "models/target", "--drafter", "ngram") as (_, url):
        address = re.search(r"gRPC +(\S+) \(outrider", (tmp_path / "log").read_text())
        assert address, url
        called = run([str(python), "-c", CALLS, address[1]], tmp_path)
    assert called.returncode == 0, called.stderr
    assert called.stdout.split()[1::2] == ["stream", "cancel", "deadline", "health", "reflection"]


def test_outrider_and_its_protos_stand_side_by_side(released: Path, tmp_path: Path) -> None:
    both = [wheel(released, name) for name in ("outrider", "outrider_protos")]
    python = environment(tmp_path / "venv", *both)
    install(python, *both)
    where = [str(python), "-c", "import outrider.v1.common_pb2 as it; print(it.__file__)"]
    assert "outrider_protos" not in run(where, tmp_path).stdout
