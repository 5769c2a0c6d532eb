"""The formulas of speculative decoding agree with values by hand and with the simulator."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider_bench.experiment import arithmetic
from outrider_bench.experiment.arithmetic import PAYS, Times, best, block_efficiency
from outrider_bench.simulator.scenario import Scenario
from outrider_bench.simulator.simulation import simulate

# The design's example, in units of a plain forward: c = 0.1 and r = 0.5.
EXAMPLE = Times((1.0,) * 17, 0.0, 0.1, 0.5)

times = st.builds(
    Times,
    st.lists(st.floats(1.0, 3.0), min_size=2, max_size=9).map(lambda found: tuple(sorted(found))),
    st.floats(0.0, 1.0),
    st.floats(0.0, 1.0),
    st.floats(0.0, 5.0),
)
acceptances = st.floats(0.0, 0.99)


def pushed(times: Times, acceptance: float, depth: int) -> arithmetic.Estimate:
    return arithmetic.pushed(times, acceptance, depth, 0.85)


@pytest.mark.parametrize(
    ("acceptance", "depth", "tokens"),
    [
        (0.8, 5, 3.68928),
        (0.5, 1, 1.5),
        (0.5, 3, 1.875),
        (0.0, 8, 1.0),
        (1.0, 4, 5.0),
        (0.9, 0, 1.0),
    ],
)
def test_block_efficiency_has_hand_computed_values(
    acceptance: float, depth: int, tokens: float
) -> None:
    assert block_efficiency(acceptance, depth) == pytest.approx(tokens)


@given(acceptances, st.integers(0, 20))
def test_block_efficiency_is_the_sum_of_all_chances(acceptance: float, depth: int) -> None:
    chances = [acceptance**position for position in range(depth + 1)]
    assert block_efficiency(acceptance, depth) == pytest.approx(sum(chances))


@pytest.mark.parametrize(
    ("way", "speed"), [(arithmetic.synchronous, 1.9), (arithmetic.chain, 2.1), (pushed, 3.2)]
)
def test_the_example_of_the_design_comes_out(way: arithmetic.Way, speed: float) -> None:
    assert best(way, EXAMPLE, 0.8).speed == pytest.approx(speed, abs=0.05)


def test_without_a_network_the_example_of_the_design_comes_out() -> None:
    found = best(arithmetic.synchronous, replace(EXAMPLE, round_trip_s=0.0), 0.8)
    assert found.speed == pytest.approx(2.5, abs=0.05)


def test_a_synchronous_hop_adds_up_all_times() -> None:
    found = arithmetic.synchronous(Times((10.0, 10.5, 11.0), 0.5, 2.0, 3.0), 0.5, 2)
    assert found.step_s == pytest.approx(11.0 + 0.5 + 2 * 2.0 + 3.0)
    assert found.speed == pytest.approx(1.75 * 10.0 / 18.5)


def test_a_chain_saves_the_wait_as_often_as_it_hits() -> None:
    found = arithmetic.chain(Times((10.0, 10.5, 11.0), 0.5, 2.0, 3.0), 0.5, 2)
    assert found.hit_rate == pytest.approx(0.125)
    assert found.step_s == pytest.approx(0.125 * 11.0 + 0.875 * 18.5)


def test_a_late_draft_is_worth_its_remaining_tokens() -> None:
    # Three plain steps pass. All three tokens are right in 1 of 8 drafts, and 5 are left of them.
    found = arithmetic.late(Times((1.0,) * 9, 0.0, 0.0, 2.5), 0.5, 8)
    assert found.undrafted_share == pytest.approx(0.75)
    assert found.speed == pytest.approx((4 + 0.125 * 0.96875) / 4)


def test_a_late_draft_without_a_depth_is_plain_decoding() -> None:
    assert arithmetic.late(EXAMPLE, 0.8, 0).speed == pytest.approx(1.0)


@given(times, acceptances)
def test_no_way_is_slower_than_plain_decoding(times: Times, acceptance: float) -> None:
    for way in (arithmetic.synchronous, arithmetic.chain, arithmetic.late, pushed):
        assert best(way, times, acceptance).speed >= 1.0 - 1e-9


@given(times, acceptances)
def test_hits_never_cost_and_the_verify_step_is_a_bound(times: Times, acceptance: float) -> None:
    synchronous = best(arithmetic.synchronous, times, acceptance).speed
    chain = best(arithmetic.chain, times, acceptance).speed
    always = max(
        arithmetic.pushed(times, acceptance, depth, 1.0).speed
        for depth in range(len(times.verify_s))
    )
    assert synchronous <= chain + 1e-9
    assert chain <= always + 1e-9


@given(times, acceptances)
def test_the_break_even_round_trip_has_a_closed_form(times: Times, acceptance: float) -> None:
    depths = range(len(times.verify_s))
    # E·p / (v + d + r) = 1.02, solved for r.
    longest = max(
        block_efficiency(acceptance, depth) * times.decode_step_s / PAYS
        - times.verify_s[depth]
        - times.draft_s(depth)
        for depth in depths
        if depth > 0
    )
    strategy = arithmetic.taking_turns
    found = arithmetic.break_even_round_trip_s(strategy, times, acceptance)
    if longest < 0.0:
        assert found is None
    elif longest >= arithmetic.MAX_ROUND_TRIP_S:
        assert found == math.inf
    else:
        assert found == pytest.approx(longest, abs=1e-6)


@given(times)
def test_the_break_even_acceptance_of_one_token_has_a_closed_form(times: Times) -> None:
    one = replace(times, verify_s=times.verify_s[:2])
    # (1 + a)·p / (v + d + r) = 1.02, solved for a.
    lowest = PAYS * (one.verify_s[1] + one.draft_s(1) + one.round_trip_s) / one.decode_step_s - 1.0
    found = arithmetic.break_even_acceptance(arithmetic.taking_turns, one)
    if lowest > arithmetic.MAX_ACCEPTANCE:
        assert found is None
    else:
        assert found == pytest.approx(max(lowest, 0.0), abs=1e-6)


@pytest.mark.parametrize("acceptance", [0.5, 0.8, 0.9])
@pytest.mark.parametrize("depth", [1, 5])
def test_simulated_steps_commit_as_many_tokens(acceptance: float, depth: int) -> None:
    drafter = {"name": "d", "acceptance": acceptance, "cost": "ngram", "round_trip_ms": 0.0}
    given = {"seconds": 600.0, "waves": 24, "sequences": [1], "output_tokens": [256]}
    fixed = {"costs": "assumed-gpu", "draft_tokens": f"fixed:{depth}", "drafters": [drafter]}
    counters = simulate(Scenario.model_validate({**given, **fixed}), 1).sample.counters
    drafts = counters["spec_decode_num_drafts"]
    tokens = 1.0 + counters["spec_decode_num_accepted_tokens"] / drafts
    assert tokens == pytest.approx(block_efficiency(acceptance, depth), rel=0.03)


@pytest.mark.parametrize("edge", [3.0, 40.0])
def test_searches_find_the_edge(edge: float) -> None:
    def falling(value: float) -> float:
        return 2.0 if value <= edge else 1.0

    assert arithmetic.longest_that_pays(falling, 0.05, 1000.0, 30) == pytest.approx(edge)
    assert arithmetic.longest_that_pays(falling, 0.0, 1000.0, 60) == pytest.approx(edge)
    assert arithmetic.longest_that_pays(falling, 0.05, edge, 30) == math.inf
    assert arithmetic.longest_that_pays(falling, edge + 1, 1000.0, 30) is None
