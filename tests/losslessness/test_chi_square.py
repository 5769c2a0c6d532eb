"""The chi-square test sees the biases that it claims to see."""

import numpy as np
import pytest

from tests.losslessness.chi_square import LEAST_P, POWER, Comparison, compare, visible_distance


@pytest.mark.parametrize(("cells", "draws"), [(30, 2_000), (150, 10_000)])
def test_a_bias_of_the_visible_distance_is_seen_nine_times_in_ten(cells: int, draws: int) -> None:
    rng = np.random.default_rng(0)
    probs = np.full(cells, 1 / cells)
    biased = probs * (1 + 2 * visible_distance(cells, draws) * np.resize([1, -1], cells))
    found = [compare(rng.multinomial(draws, biased), probs * draws) for _ in range(1_000)]
    seen = np.mean([comparison.p < LEAST_P for comparison in found])
    assert seen == pytest.approx(POWER, abs=0.03)
    assert {comparison.visible for comparison in found} == {visible_distance(cells, draws)}


def test_a_test_fails_with_too_few_draws_for_its_claim() -> None:
    probs = np.array([0.5, 0.3, 0.2])

    def compared(draws: int) -> Comparison:
        return compare((probs * draws).astype(np.int64), probs * draws)

    compared(10_000).must_agree(sees=0.03)
    with pytest.raises(AssertionError, match="more draws are needed"):
        compared(100).must_agree(sees=0.03)


def test_an_impossible_cell_is_a_bias_however_rare() -> None:
    assert compare(np.array([50, 50, 1]), np.array([50.0, 51.0, 0.0])).p == 0.0
