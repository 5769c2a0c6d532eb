"""Theory keeps to its limits, and the simulator reproduces the papers' figures."""

from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider_bench.experiment.dsi_pairs import expected_time, prediction_of
from outrider_bench.experiment.papers import Pair, dsi_points, published, ssd_predictions
from outrider_bench.experiment.pearl_pairs import windows_of
from outrider_bench.experiment.speculation import acceptance_of, dsi_rate, pearl_tokens, si_rate


@given(st.floats(0.001, 0.99), st.floats(0.01, 0.98), st.integers(1, 20))
def test_dsi_is_never_slower_than_si_nor_than_plain_decoding(c: float, a: float, k: int) -> None:
    """The theorem of the paper, for drafters that are faster than the target."""
    assert dsi_rate(1.0, c, a, k) >= max(si_rate(1.0, c, a, k), 1.0) * (1 - 1e-6)


def test_dsi_with_a_perfect_drafter_is_as_fast_as_the_drafter() -> None:
    assert dsi_rate(1.0, 0.1, 0.999, 1) == pytest.approx(10.0, rel=0.02)


@given(st.floats(0.01, 0.98), st.integers(1, 20))
def test_the_acceptance_follows_from_the_rate(a: float, k: int) -> None:
    assert acceptance_of(si_rate(1.0, 0.1, a, k), 1.0, 0.1, k) == pytest.approx(a, abs=1e-6)


def test_a_rate_that_no_acceptance_explains_is_refused() -> None:
    with pytest.raises(ValueError, match="no acceptance gives"):
        acceptance_of(100.0, 1.0, 0.1, 5)


@pytest.mark.parametrize("name", ["dsi", "ssd", "pearl"])
def test_every_paper_says_where_its_figures_come_from(name: str) -> None:
    paper = published(name)
    assert paper.address.startswith("https://arxiv.org/abs/")
    assert paper.via
    assert paper.rows or paper.pairs or paper.missing


def test_the_simulated_engine_drafts_and_verifies_in_turn_as_theory_says() -> None:
    pair = Pair(0.03, 0.003, 0.8)
    assert pair.si(5) == pytest.approx(si_rate(0.03, 0.003, 0.8, 5), rel=0.03)


# --- DSI's table of pairs ---


@given(st.floats(0.01, 1.0), st.floats(0.01, 0.99), st.sampled_from([1, 5, 10]))
def test_dsi_by_the_authors_rules_is_never_slower_than_si(c: float, a: float, k: int) -> None:
    dsi, si = (expected_time(1.0, c, a, k, at_once=at_once) for at_once in (True, False))
    assert dsi <= si * (1 + 1e-9)


@pytest.mark.parametrize(
    ("at_once", "expected"),
    # Two runs of 20 right guesses, each rejected in its fifth block of 5, and the first
    # verification of the third run.
    [(True, 2 * (5 * 0.5 + 1) + 1), (False, 2 * (1 + 5 * (0.5 + 1)) + 1)],
)
def test_a_drafter_that_is_always_right_makes_runs_of_20(at_once: bool, expected: float) -> None:
    found = expected_time(1.0, 0.1, 1 - 1e-12, 5, at_once=at_once)
    assert found == pytest.approx(expected)


def test_a_start_without_a_right_guess_commits_nothing() -> None:
    """With an acceptance of a half a start commits 1 token in the mean, and the last one too many.

    So 52 starts (Wald's equation), each of one forward if drafting takes no time.
    """
    assert expected_time(1.0, 1e-12, 0.5, 10, at_once=True) == pytest.approx(52.0, rel=0.001)


def test_dsis_table_of_pairs_has_errors_that_docs_papers_names() -> None:
    paper = published("dsi")
    errors = [abs(prediction_of(pair).error) for pair in paper.pairs]
    assert len(errors) == 10
    assert round(median(errors), 3) == 0.098
    assert round(max(errors), 3) == 0.354
    assert "from memory" in paper.pairs_note


# --- PEARL ---


@given(st.floats(0.01, 0.99), st.integers(1, 20))
def test_pearl_commits_at_least_a_token_in_each_forward(a: float, k: int) -> None:
    assert 1.0 - 1e-9 <= pearl_tokens(a, k) <= k + 1


def test_pearl_with_a_perfect_drafter_commits_a_whole_window_each_time() -> None:
    assert pearl_tokens(1 - 1e-9, 8) == pytest.approx(8.0, rel=1e-6)


def test_a_window_of_one_loses_a_forward_for_each_run_of_right_guesses() -> None:
    """A run of n right guesses, and its end, takes n + 1 forwards and commits n + 1 tokens."""
    assert pearl_tokens(0.7, 1) == pytest.approx(1.0)


def test_pearls_speeds_are_reproduced_on_the_datasets_that_set_no_window() -> None:
    errors = [
        abs(found.error)
        for pair in published("pearl").windows
        for found in windows_of(pair)
        if not found.sets_window
    ]
    assert len(errors) == 18
    assert median(errors) < 0.05


@pytest.mark.slow
def test_si_is_reproduced_and_the_planner_never_loses() -> None:
    grid = published("dsi").grid
    assert grid is not None
    points = list(dsi_points(grid))
    errors = [abs(point.simulated_si / point.si - 1.0) for point in points]
    assert median(errors) < 0.05
    assert min(point.si for point in points) < 1.0
    assert min(point.pushed for point in points) > 0.985


@pytest.mark.slow
def test_published_rates_of_sd_are_reproduced_and_those_of_ssd_bounded() -> None:
    for row in ssd_predictions(published("ssd")):
        assert row.simulated_sd == pytest.approx(row.sd, rel=0.05)
        assert row.simulated_sd < row.ssd < row.all_hits
