"""The table for hardware that is not here is marked as assumed, with its sources."""

from outrider_bench.simulator.costs import load


def test_the_table_of_a_gb200_says_that_it_is_assumed_and_cites() -> None:
    costs = load("gb200")
    assert not costs.measured
    assert costs.source.startswith("assumed, not measured; ")
    assert costs.source.count("https://") >= 4
