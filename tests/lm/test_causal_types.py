"""Every causal type of `transformers` is served right or refused, as docs/models.md says."""

from __future__ import annotations

import pytest

from tests.lm.causal_types import HEADING, PAGE, TYPES, Verdict, judge_all, section

# Builds and judges some 200 models, in half a minute.
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def verdicts() -> dict[str, Verdict]:
    return judge_all()


@pytest.mark.parametrize("name", TYPES)
def test_a_type_is_served_rightly_or_refused(name: str, verdicts: dict[str, Verdict]) -> None:
    assert verdicts[name].kind in ("equal", "refused", "not tried"), verdicts[name].why


def test_the_page_lists_what_was_found(verdicts: dict[str, Verdict]) -> None:
    _, _, found = PAGE.read_text().partition(HEADING)
    assert HEADING + found == section(verdicts), "run python -m tests.lm.causal_types"


def test_most_types_are_tried(verdicts: dict[str, Verdict]) -> None:
    untried = [name for name in TYPES if verdicts[name].kind == "not tried"]
    assert len(untried) < len(TYPES) / 8, {name: verdicts[name].why for name in untried}
