"""A wheel, with the engine's step compiled, behaves like the sources."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# The tests that run with compiled modules: they run most of the compiled lines, also with values
# of wrong types.
TESTS = [
    *("verifier/test_engine.py", "verifier/test_trie.py", "verifier/test_tree_steps.py"),
    *("verifier/test_hostile_drafts.py", "verifier/test_known_attacks.py"),
    *("drafter/test_draft_stream.py", "drafter/test_session.py"),
]
COMPILED = ["verifier_svc.engine.loop", "verifier_svc.state.trie", "outrider.protocol.messages"]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Return a copy of the tracked files, in which a build may leave its output.

    The kernels in C are not built, since that takes long.
    """
    copy = tmp_path / "tree"
    command = ["git", "ls-files"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in listed.splitlines():
        if not name.startswith(("models/", "tests/")):
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, copy / name)
    described = (copy / "setup.py").read_text()
    (copy / "setup.py").write_text(described.replace("*_kernels(), ", ""))
    return copy


def install(tree: Path, folder: Path, **environment: str) -> Path:
    """Install the tree's wheel, without dependencies, into a folder."""
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
    command = [*pip, "--target", str(folder), str(tree)]
    subprocess.run(command, env=os.environ | environment, check=True)
    return folder


def run(command: list[str], installed: Path) -> str:
    """Run a command on the installed files, and return its output."""
    # The command must not run in the tree, where Python would import the tree's packages instead.
    environment = os.environ | {"PYTHONPATH": str(installed)}
    done = subprocess.run(
        command, cwd=installed, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def where(module: str, installed: Path) -> Path:
    """Return the file of an installed module."""
    program = f"import {module} as it; print(it.__file__)"
    found = Path(run([sys.executable, "-c", program], installed).strip())
    assert found.is_relative_to(installed)
    return found


@pytest.mark.slow
def test_a_wheel_has_the_compiled_step_which_passes_the_tests(tree: Path, tmp_path: Path) -> None:
    installed = install(tree, tmp_path / "installed")
    for library in (ROOT / "outrider/lm/cpu").glob("_cpu*.so"):
        shutil.copy(library, installed / "outrider/lm/cpu")
    assert {where(module, installed).suffix for module in COMPILED} == {".so"}
    vendored = {path.name for path in (installed / "gateway/web/vendor").iterdir()}
    assert vendored == {"uPlot.iife.js", "uPlot.min.css"}
    pytest_here = [sys.executable, "-P", "-m", "pytest", "-c", str(ROOT / "pyproject.toml")]
    tests = [str(ROOT / "tests" / name) for name in TESTS]
    assert "passed" in run([*pytest_here, "-q", "-m", "not slow", *tests], installed)
    scenario = tmp_path / "scenario.yaml"
    scenario.write_text("seconds: 1\nsequences: [2]\ndrafters: [{name: d, acceptance: 0.8}]\n")
    simulate = [sys.executable, "-m", "outrider_cli.main", "lab", "simulate", str(scenario)]
    assert "│ drafted │" in run(simulate, installed)


@pytest.mark.slow
def test_a_wheel_has_the_sources_if_part_of_the_step_cannot_compile(
    tree: Path, tmp_path: Path
) -> None:
    fails = tmp_path / "cc"
    fails.write_text('#!/bin/sh\ncase "$*" in *__native_*) exit 1 ;; esac\nexec cc "$@"\n')
    fails.chmod(0o755)
    installed = install(tree, tmp_path / "installed", CC=str(fails))
    assert {where(module, installed).suffix for module in COMPILED} == {".py"}
