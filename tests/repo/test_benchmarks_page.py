"""docs/benchmarks.md and every figures.md are made from results.json, which has a schema."""

from __future__ import annotations

import json
import re
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from outrider_bench.results_page import load, pages

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/benchmarks.md"
FILES = sorted((ROOT / "bench/results").glob("*/results.json"))


def changed(tmp_path: Path, **fields: Any) -> Path:
    """A results.json whose first result has other fields; None removes one."""
    data = json.loads(FILES[0].read_text())
    result = {**data["results"][0], **fields}
    data["results"][0] = {name: value for name, value in result.items() if value is not None}
    path = tmp_path / "results.json"
    path.write_text(json.dumps(data))
    return path


def test_the_pages_are_what_the_generator_makes_of_the_results() -> None:
    made = pages(ROOT)
    assert made.keys() == {PAGE, *(path.parent / "figures.md" for path in FILES)}
    assert {path: path.read_text() for path in made} == made


def test_the_page_has_at_most_150_lines() -> None:
    assert len(PAGE.read_text().splitlines()) <= 150


def test_lines_outside_of_tables_have_at_most_100_columns() -> None:
    for path, text in pages(ROOT).items():
        lines = [line for line in text.splitlines() if line[:1] not in ("|", "#")]
        assert [line for line in lines if len(line) > 100] == [], path


def test_each_link_to_a_result_has_a_heading_to_lead_to() -> None:
    made = pages(ROOT)
    links = re.findall(r"\]\(\.\./(bench/results/\S+/figures\.md)#(\S+)\)", made[PAGE])
    assert len(links) > 30
    for path, anchor in links:
        titles = re.findall(r"(?m)^## (.*)$", made[ROOT / path])
        assert anchor in [re.sub(r"[^a-z0-9 -]", "", t.lower()).replace(" ", "-") for t in titles]


def test_every_folder_says_what_machine_was_measured() -> None:
    for path in FILES:
        assert path.parent.name.startswith(load(path).date)
        assert "cores" in load(path).machine


def test_numbers_keep_the_digits_they_are_written_with(tmp_path: Path) -> None:
    rows = [{"name": "n-gram", "values": [1.5]}]
    path = changed(tmp_path, columns=["way", "batch 1"], rows=rows)
    path.write_text(path.read_text().replace("1.5", "1.50"))
    assert load(path).results[0].rows[0].values == [Decimal("1.50")]
    assert str(load(path).results[0].rows[0].values[0]) == "1.50"


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"commit": None}, "results.0.commit: "),
        ({"colour": "red"}, "results.0.colour: "),
        ({"table": "yes"}, "results.0.table: "),
        ({"columns": ["way"], "rows": [{"name": "a", "values": [1]}]}, "'a' has 1 values for 0"),
        (
            {"columns": ["way", "b"], "rows": [{"name": "a", "values": ["1"]}]},
            "results.0.rows.0.values.0",
        ),
        (
            {"columns": ["way", "b"], "rows": [{"name": "a", "values": [{"low": 2, "high": 1}]}]},
            "low, median and high must be in order",
        ),
    ],
)
def test_an_error_names_the_file_and_the_field(
    tmp_path: Path, fields: dict[str, Any], problem: str
) -> None:
    path = changed(tmp_path, **fields)
    with pytest.raises(ValueError, match=re.escape(problem)) as caught:
        load(path)
    assert str(caught.value).startswith(f"{path}: results.0")
