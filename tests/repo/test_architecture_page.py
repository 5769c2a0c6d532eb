"""The functions, methods and files that docs/architecture.md names exist."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/architecture.md").read_text()
REFERENCES = sorted(set(re.findall(r"`([\w/]+\.py):([\w.]+)`", PAGE)))
PATHS = sorted(set(re.findall(r"`(\w+/[\w/]+\.py)[`:]", PAGE)))


def definitions(path: Path) -> set[str]:
    """Return a module's classes and functions, and the methods of its classes as `Class.method`."""
    names = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            functions = (ast.FunctionDef, ast.AsyncFunctionDef)
            methods = [child.name for child in node.body if isinstance(child, functions)]
            names.update(f"{node.name}.{method}" for method in methods)
    return names


def exists(file: str, name: str) -> bool:
    """Return whether a module of the repository defines the function, class or method."""
    path = ROOT / file
    return path.exists() and name in definitions(path)


def test_every_function_named_exists() -> None:
    assert len(REFERENCES) > 30
    assert [f"{file}:{name}" for file, name in REFERENCES if not exists(file, name)] == []


def test_every_file_named_with_its_folder_exists() -> None:
    rooms = ("", "verifier_svc/")
    missing = [path for path in PATHS if not any((ROOT / room / path).exists() for room in rooms)]
    assert missing == []
