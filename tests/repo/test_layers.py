"""Modules load no library that they do not need; the distribution has only the project's packages.

`make lint` checks which packages import which.
"""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from setuptools import find_namespace_packages

from outrider.process.settings.config import MODEL_LIBRARIES

ROOT = Path(__file__).parents[2]
PACKAGES = {
    "outrider",
    "verifier_svc",
    "drafter_svc",
    "gateway",
    "outrider_cli",
    "outrider_bench",
}


def test_an_installation_has_no_other_top_level_packages() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    include = project["tool"]["setuptools"]["packages"]["find"]["include"]
    found = find_namespace_packages(str(ROOT), include=include)
    assert {name.partition(".")[0] for name in found} == PACKAGES


WITHOUT_MODELS = [
    "gateway.__main__",
    "gateway.http.openai.routes",
    "drafter_svc.__main__",
    "outrider_cli.verifier",
    "verifier_svc.__main__",
    "drafter_svc.families.ngram",
    "drafter_svc.families.model",
    "outrider_cli.main",
]


@pytest.mark.parametrize(
    ("modules", "without"),
    [(["gateway.http.openai.to_requests"], ("google", "grpc")), (WITHOUT_MODELS, MODEL_LIBRARIES)],
    ids=["http-validation", "processes-before-a-model"],
)
def test_modules_load_without_libraries_that_they_do_not_need(
    modules: list[str], without: tuple[str, ...]
) -> None:
    loaded = "{name.partition('.')[0] for name in sys.modules}"
    program = f"import sys, {', '.join(modules)}; sys.exit({loaded} & {set(without)} or 0)"
    ended = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (ended.returncode, ended.stderr) == (0, "")


@pytest.mark.parametrize(
    "command", ["verifier_svc --target x", "drafter_svc --family model --model x"]
)
def test_a_process_without_torch_names_the_missing_extra(command: str) -> None:
    """A module that is None in sys.modules seems not installed, as without the package's extras."""
    module, *arguments = command.split()
    without = f"import runpy, sys; sys.argv[1:] = {arguments}"
    without += f"; sys.modules.update(dict.fromkeys({MODEL_LIBRARIES}))"
    program = f"{without}; runpy.run_module({module!r}, run_name='__main__')"
    line = [sys.executable, "-c", program]
    ended = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 1
    assert f"needs {', '.join(MODEL_LIBRARIES)}; in Outrider's sources" in ended.stderr
    assert "Traceback" not in ended.stderr
