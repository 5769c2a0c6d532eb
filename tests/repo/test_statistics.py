"""Functions, classes and files stay small, lines sparse, and exceptions to the rules explained."""

import ast
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("outrider", "verifier_svc", "drafter_svc", "gateway", "outrider_bench")
ALL = (*PACKAGES, "tests")
FUNCTION_LINES = 50
CLASS_LINES = 250
FILE_LINES = 400
CONDITIONALS = 12
"""Most conditional expressions in 1,000 lines, and below, most paired assignments."""
PAIRS = 4
DOCUMENTED = 0.95
BROAD = re.compile(r" *except (Base)?Exception\b")
# An ignored error whose line does not end with a reason.
UNEXPLAINED = re.compile(r"# type: ignore\[[\w, -]+\]$")
Function = ast.FunctionDef | ast.AsyncFunctionDef


def sources(package: str) -> list[Path]:
    """The package's files but for generated ones."""
    return [path for path in sorted((ROOT / package).rglob("*.py")) if "v1" not in path.parts]


def nodes(package: str) -> Iterator[tuple[Path, ast.AST]]:
    for path in sources(package):
        for node in ast.walk(ast.parse(path.read_text())):
            yield path, node


def lines_of(node: Function | ast.ClassDef) -> int:
    """Lines from the first word to the last, without decorators."""
    return (node.end_lineno or node.lineno) - node.lineno + 1


def is_pair(node: ast.AST) -> bool:
    """Whether the node assigns several values to as many names, as in `a, b = x, y`."""
    return (
        isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Tuple)
        and isinstance(node.value, ast.Tuple)
    )


def public_functions(body: list[ast.stmt]) -> Iterator[Function]:
    """Functions and methods that a caller from another module may use."""
    for node in body:
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            yield from public_functions(node.body)
        elif isinstance(node, Function) and not node.name.startswith("_"):
            yield node


@pytest.mark.parametrize("package", ALL)
def test_functions_and_classes_fit_a_screen_and_a_sitting(package: str) -> None:
    for path, node in nodes(package):
        if isinstance(node, Function):
            assert lines_of(node) <= FUNCTION_LINES, f"{path}: {node.name}"
        elif isinstance(node, ast.ClassDef):
            assert lines_of(node) <= CLASS_LINES, f"{path}: {node.name}"


def test_no_file_is_long() -> None:
    listing = ["git", "ls-files", "*.py", ":!*_pb2*.py"]
    names = subprocess.run(listing, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in names.splitlines():
        assert len((ROOT / name).read_text().splitlines()) <= FILE_LINES, name


@pytest.mark.parametrize("package", ALL)
def test_lines_are_not_dense(package: str) -> None:
    """Blank lines do not count: they would hide dense ones."""
    texts = [path.read_text().splitlines() for path in sources(package)]
    thousands = sum(bool(line.strip()) for text in texts for line in text) / 1000
    found = [node for _, node in nodes(package)]
    assert sum(isinstance(node, ast.IfExp) for node in found) / thousands <= CONDITIONALS
    assert sum(map(is_pair, found)) / thousands <= PAIRS


@pytest.mark.parametrize("package", PACKAGES)
def test_public_functions_have_docstrings(package: str) -> None:
    trees = [ast.parse(path.read_text()) for path in sources(package)]
    functions = [function for tree in trees for function in public_functions(tree.body)]
    missing = [function.name for function in functions if ast.get_docstring(function) is None]
    assert len(missing) <= (1 - DOCUMENTED) * len(functions), missing


@pytest.mark.parametrize("package", PACKAGES)
def test_broad_handlers_and_ignored_types_have_their_reason(package: str) -> None:
    """In a comment on the line above, or behind the ignored error."""
    for path in sources(package):
        lines = path.read_text().splitlines()
        for above, line in zip(["", *lines], lines, strict=False):
            if BROAD.match(line) or UNEXPLAINED.search(line):
                assert above.lstrip().startswith("#"), f"{path}: {line}"
