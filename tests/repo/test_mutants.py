"""Every bug that `python -m tests.mutants` plants still applies, and its tests exist."""

from pathlib import Path

import pytest

from tests.mutants.mutant import Mutant
from tests.mutants.table import MUTANTS

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_applies_and_its_tests_exist(mutant: Mutant) -> None:
    source = (ROOT / mutant.path).read_text()
    compile(mutant.applied(source), mutant.path, "exec")
    for test in mutant.tests:
        path, _, name = test.partition("::")
        assert (ROOT / path).exists(), test
        if name:
            assert f"def {name.partition('[')[0]}(" in (ROOT / path).read_text(), test


def test_each_mutant_has_a_name_of_its_own() -> None:
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)
