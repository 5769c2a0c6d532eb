"""What a wheel holds, where the engine's step is compiled, does what the sources do."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what the wheel of this tree installs, and nothing else."""
    folder = tmp_path_factory.mktemp("wheel")
    subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder), str(ROOT)], check=True)
    return folder


def run(command: list[str], installed: Path) -> str:
    # Not from the tree, which would come first.
    environment = os.environ | {"PYTHONPATH": str(installed)}
    done = subprocess.run(command, cwd=installed, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("module", ["verifier_svc.engine", "verifier_svc.trie", "outrider.messages"])
def test_the_step_is_compiled(installed: Path, module: str) -> None:
    found = run([sys.executable, "-c", f"import {module} as it; print(it.__file__)"], installed)
    assert Path(found.strip()).parent.parent == installed
    assert found.strip().endswith(".so")


@pytest.mark.slow
def test_the_verifiers_tests_hold_for_what_is_compiled(installed: Path) -> None:
    pytest_here = [sys.executable, "-P", "-m", "pytest", "-c", str(ROOT / "pyproject.toml")]
    told = run([*pytest_here, "-q", "-m", "not slow", str(ROOT / "tests/verifier")], installed)
    assert "passed" in told
