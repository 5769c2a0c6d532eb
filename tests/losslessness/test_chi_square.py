"""The statistics behind the other tests see what they are said to see."""

import numpy as np
import pytest
from chi_square import LEAST_P, POWER, compare, visible_distance


@pytest.mark.parametrize(("cells", "draws"), [(30, 2_000), (150, 10_000)])
def test_a_bias_of_the_visible_distance_is_seen_nine_times_in_ten(cells: int, draws: int) -> None:
    rng = np.random.default_rng(0)
    law = np.full(cells, 1 / cells)
    biased = law * (1 + 2 * visible_distance(cells, draws) * np.resize([1, -1], cells))
    found = [compare(rng.multinomial(draws, biased), law * draws) for _ in range(1_000)]
    assert np.mean([comparison.p < LEAST_P for comparison in found]) == pytest.approx(
        POWER, abs=0.03
    )
    assert {comparison.visible for comparison in found} == {visible_distance(cells, draws)}


def test_a_test_fails_with_too_few_draws_for_its_claim() -> None:
    law = np.array([0.5, 0.3, 0.2])
    few, many = (compare((law * draws).astype(np.int64), law * draws) for draws in (100, 10_000))
    many.must_agree(sees=0.03)
    with pytest.raises(AssertionError, match="more draws are needed"):
        few.must_agree(sees=0.03)


def test_an_impossible_cell_is_a_bias_however_rare() -> None:
    assert compare(np.array([50, 50, 1]), np.array([50.0, 51.0, 0.0])).p == 0.0
