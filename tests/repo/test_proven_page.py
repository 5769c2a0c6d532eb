"""Each row of the table of what is proven names tests or results that exist, and a date."""

import datetime
import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs/proven.md"
HEADER = "| capability | CPU | GPU | published model | how tested | date |"
VERSIONS = "| part | version | ran or read | where | evidence | date |"


def rows(header: str = HEADER) -> list[list[str]]:
    """Return the cells of each row of the table that has this header."""
    lines = PAGE.read_text().partition(header)[2].strip().partition("\n\n")[0].splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[1:]]


@pytest.mark.parametrize("row", rows(), ids=lambda row: row[0])
def test_a_capability_has_a_test_or_a_result_and_its_date(row: list[str]) -> None:
    _, cpu, gpu, published, evidence, date = row
    assert all((cpu, gpu, published))
    assert datetime.date.fromisoformat(date) <= datetime.datetime.now(datetime.UTC).date()
    targets = re.findall(r"\]\(([^)#]*)", evidence)
    proofs = [(PAGE.parent / target).resolve() for target in targets if target.startswith("..")]
    assert proofs or "models.md" in targets
    assert all(proof.is_file() for proof in proofs)


@pytest.mark.parametrize("row", rows(VERSIONS), ids=lambda row: f"{row[0]} {row[1]}")
def test_a_version_has_a_date_and_evidence_if_it_ran(row: list[str]) -> None:
    _, version, how, where, evidence, date = row
    assert all((version, where))
    assert how in {"ran", "read"}
    assert datetime.date.fromisoformat(date) <= datetime.datetime.now(datetime.UTC).date()
    proofs = [PAGE.parent / target for target in re.findall(r"\]\(([^)#]*)", evidence)]
    assert proofs
    assert all(proof.is_file() for proof in proofs)
    # A version whose code was only read ran nowhere.
    assert (how == "read") == (where == "–")


def test_the_tables_have_rows() -> None:
    assert len(rows()) > 15
    assert len(rows(VERSIONS)) > 8
