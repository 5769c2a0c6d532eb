"""A release that `make release` built in a clone, and environments with wheels but no checkout."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.repo.test_layers import PACKAGES

ROOT = Path(__file__).parents[2]

# Stops a process that reads a module of the checkout.
GUARD = """
import sys

def refuse(event, arguments):
    if event in ("open", "import"):
        for path in arguments[:2]:
            if isinstance(path, str) and path.startswith({places!r}):
                raise RuntimeError(f"{{path}} is of the checkout")

sys.addaudithook(refuse)
"""


def release(folder: Path, **settings: str) -> Path:
    """Build a release of the checkout's commit in a new clone; return the folder of its files.

    The clone lacks the models, which no release has, and the tests.
    """
    clone = folder / "clone"
    git = ["git", "-C", str(clone)]
    cloning = ["git", "clone", "--quiet", "--shared", "--no-checkout", str(ROOT), str(clone)]
    made = folder / "release"
    for command in (
        cloning,
        [*git, "sparse-checkout", "set", "--no-cone", "/*", "!/models/", "!/tests/"],
        [*git, "checkout", "--quiet"],
        ["make", "-C", str(clone), "release", f"PYTHON={sys.executable}", f"INTO={made}"],
    ):
        environment = os.environ | settings
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    return made


@pytest.fixture(scope="session")
def released(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a release of this commit."""
    return release(tmp_path_factory.mktemp("released"))


def environment(folder: Path, *wheels: Path) -> Path:
    """Make a virtual environment away from the checkout; return its python.

    The environment has the given wheels, and the other packages of the tests' environment. If one
    of its processes reads a module of the checkout, the process ends with an error.
    """
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    python = folder / "bin/python"
    install(python, *wheels)
    [site] = folder.glob("lib/python*/site-packages")
    places = tuple(f"{ROOT / package}/" for package in sorted(PACKAGES))
    (site / "checkout_guard.py").write_text(GUARD.format(places=places))
    (site / "checkout_guard.pth").write_text("import checkout_guard\n")
    # .pth files in these folders are not read, so the editable package of the tests stays away.
    others = [path for path in sys.path if path.endswith("site-packages")]
    (site / "zz_others.pth").write_text("\n".join(others) + "\n")
    return python


def install(python: Path, *wheels: Path) -> None:
    """Install wheels without their dependencies."""
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet"]
    subprocess.run([*pip, "--no-deps", "--no-index", *map(str, wheels)], check=True)


def run(command: list[str], at: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a command in a folder, without the variables that could lead Python elsewhere."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    return subprocess.run(
        command, cwd=at, env=kept | variables, capture_output=True, text=True, check=False
    )
