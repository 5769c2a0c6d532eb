"""Calls that no module may make, and what a module loads. import-linter checks the layers."""

import ast
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import TypeGuard

import pytest
from setuptools import find_namespace_packages

from outrider.process.config import MODEL_LIBRARIES

ROOT = Path(__file__).parents[2]
SERVICES = ("verifier_svc", "drafter_svc", "gateway")
BENCH = "outrider_bench"
PACKAGES = ("outrider", *SERVICES, BENCH)
RUNTIME = ROOT / "outrider/process/runtime.py"
WRITES = (
    "os.environ[",
    "os.environ.setdefault",
    "os.environ.update",
    "os.environ.pop",
    "os.putenv",
)


def sources(package: str) -> Iterator[Path]:
    """The package's files but for generated ones."""
    return (path for path in sorted((ROOT / package).rglob("*.py")) if "v1" not in path.parts)


def imported(path: Path) -> set[str]:
    """Full names of everything that a file imports, in functions too."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return names


def roots(path: Path) -> set[str]:
    """Names of the packages that a file imports."""
    return {name.partition(".")[0] for name in imported(path)}


def is_text(node: ast.AST) -> TypeGuard[ast.Constant]:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def names_in(tree: ast.AST) -> set[str]:
    """Names of all attributes, and of everything that is imported."""
    nodes = list(ast.walk(tree))
    attributes = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    return attributes | {node.name for node in nodes if isinstance(node, ast.alias)}


def environment_writes(nodes: Iterator[ast.AST]) -> list[str]:
    """Targets and calls that change the environment of the process."""
    targets: list[ast.expr] = []
    for node in nodes:
        if isinstance(node, ast.Assign | ast.Delete):
            targets += node.targets
        elif isinstance(node, ast.AugAssign):
            targets.append(node.target)
        elif isinstance(node, ast.Call):
            targets.append(node.func)
    texts = map(ast.unparse, targets)
    return [text for text in texts if text == "os.environ" or text.startswith(WRITES)]


def executed_at_import(tree: ast.AST) -> Iterator[ast.AST]:
    """All nodes outside of functions."""
    for child in ast.iter_child_nodes(tree):
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield child
            yield from executed_at_import(child)


def test_outrider_never_names_bench() -> None:
    """Its commands are found through entry points, so not even their names are in the code."""
    for path in sources("outrider"):
        texts = {node.value for node in ast.walk(ast.parse(path.read_text())) if is_text(node)}
        assert not [text for text in texts if text.startswith(f"{BENCH}.")], path


def test_an_installation_has_no_other_top_level_packages() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    include = project["tool"]["setuptools"]["packages"]["find"]["include"]
    found = find_namespace_packages(str(ROOT), include=include)
    assert {name.partition(".")[0] for name in found} == set(PACKAGES)


def test_only_one_module_sets_environment_variables_when_imported() -> None:
    assert environment_writes(ast.walk(ast.parse(RUNTIME.read_text())))
    for package in PACKAGES:
        for path in set(sources(package)) - {RUNTIME}:
            assert not environment_writes(executed_at_import(ast.parse(path.read_text()))), path


def test_only_one_module_ends_the_process_without_teardown() -> None:
    assert "os._exit(" in RUNTIME.read_text()
    for package in PACKAGES:
        for path in set(sources(package)) - {RUNTIME}:
            assert "_exit" not in names_in(ast.parse(path.read_text())), path


def test_http_validation_loads_no_protobuf_and_no_grpc() -> None:
    loaded = "any(name.partition('.')[0] in ('google', 'grpc') for name in sys.modules)"
    program = f"import sys, gateway.http.parameters; sys.exit({loaded})"
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=False).returncode == 0


@pytest.mark.parametrize(
    "module",
    [
        "gateway.server",
        "gateway.http.openai",
        "drafter_svc.__main__",
        "verifier_svc.__main__",
        "drafter_svc.families.ngram",
        "drafter_svc.families.model",
        "outrider.launch.cli",
    ],
)
def test_modules_that_run_no_model_load_without_its_libraries(module: str) -> None:
    program = (
        f"import sys, {module}; sys.exit(not sys.modules.keys().isdisjoint({MODEL_LIBRARIES}))"
    )
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=False).returncode == 0


@pytest.mark.parametrize(
    "command", ["verifier_svc --target x", "drafter_svc --family model --model x"]
)
def test_a_process_without_torch_names_the_missing_extra(command: str) -> None:
    """As after `pip install outrider` without extras: an import of None in sys.modules fails."""
    module, *arguments = command.split()
    without = f"import runpy, sys; sys.argv[1:] = {arguments}"
    without += f"; sys.modules.update(dict.fromkeys({MODEL_LIBRARIES}))"
    program = f"{without}; runpy.run_module({module!r}, run_name='__main__')"
    line = [sys.executable, "-c", program]
    ended = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 1
    assert f"needs {', '.join(MODEL_LIBRARIES)}; in Outrider's sources" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_no_module_unpickles_or_evaluates_data() -> None:
    for package in ("outrider", *SERVICES):
        for path in sources(package):
            assert not roots(path) & {"pickle", "marshal", "shelve", "dill"}, path
            nodes = ast.walk(ast.parse(path.read_text()))
            called = {ast.unparse(node.func) for node in nodes if isinstance(node, ast.Call)}
            assert not called & {"eval", "exec", "torch.load"}, path
