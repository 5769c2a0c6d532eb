"""The tests that SECURITY.md names exist, so that no claim outlives its test."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NAMED = sorted(
    set(re.findall(r"`(tests/[\w/.]+)(?:::(\w+))?`", (ROOT / "SECURITY.md").read_text()))
)


@pytest.mark.parametrize(("path", "test"), NAMED, ids="::".join)
def test_each_test_that_a_claim_names_exists(path: str, test: str) -> None:
    assert (ROOT / path).exists()
    if test:
        tree = ast.parse((ROOT / path).read_text())
        defined = [
            node.name
            for node in tree.body
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        ]
        assert test in defined


def test_claims_name_many_tests() -> None:
    assert len(NAMED) > 25
