"""Each row of the table of what is proven names tests or results that exist, and a date."""

import datetime
import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs/proven.md"
HEADER = "| capability | CPU | GPU | published model | how tested | date |"


def rows() -> list[list[str]]:
    """Return the cells of each row."""
    lines = PAGE.read_text().partition(HEADER)[2].strip().partition("\n\n")[0].splitlines()
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


def test_the_table_has_rows() -> None:
    assert len(rows()) > 15
