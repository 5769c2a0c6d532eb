"""The processor time of verifiers that serve together, told apart by its parts."""

import os
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider_bench.experiment import together
from outrider_bench.experiment.hosts import process_cpu_s, thread_cpu_s
from outrider_bench.experiment.together import Loads, Spent, with_loads
from outrider_bench.simulator.costs import Costs
from tests.experiment.made_up_profile import COSTS

SECONDS = st.floats(0.0001, 0.01)


def loads(engine_s: float, request_s: float, message_s: float, at_once: float = 1.0) -> Loads:
    """Loads in which each token takes `engine_s` and each part beside it what is given.

    `at_once` forwards compute at the same time on average.
    """
    short, long = (
        Spent(
            tokens * engine_s,
            8 * request_s + tokens * message_s,
            tokens * engine_s / at_once,
            8,
            tokens,
        )
        for tokens in (128, 768)
    )
    return Loads(short, long)


@given(SECONDS, SECONDS)
def test_two_lengths_of_answers_tell_a_requests_cost_from_a_messages(
    request_s: float, message_s: float
) -> None:
    found = loads(0.01, request_s, message_s)
    assert found.front_request_s == pytest.approx(request_s)
    assert found.front_message_s == pytest.approx(message_s)


def test_the_figures_of_full_cores_count_and_no_copy_makes_a_forward_quicker() -> None:
    costs = Costs.model_validate(COSTS)
    by_count = {1: loads(0.01, 0.002, 0.001), 2: loads(0.009, 0.003, 0.001, at_once=2.0)}
    by_count[4] = loads(0.014, 0.004, 0.002, at_once=4.0)
    found = with_loads(costs, by_count, threads=1)
    assert found.concurrent == pytest.approx({1: 1.0, 2: 1.0, 4: 1.4})
    assert found.front_request_s == pytest.approx(0.004)
    assert found.front_message_s == pytest.approx(0.002)
    assert found.forwards == costs.forwards


@pytest.mark.parametrize(("at_once", "slower"), [(2.0, 1.4), (1.8, 1.5), (0.9, 1.8)])
def test_forwards_that_had_no_core_all_the_time_slow_each_other_down_more_with_one(
    at_once: float, slower: float
) -> None:
    by_count = {1: loads(0.01, 0.0, 0.001), 2: loads(0.014, 0.0, 0.001, at_once)}
    found = with_loads(Costs.model_validate(COSTS), by_count, threads=1)
    assert found.concurrent[2] == pytest.approx(slower)


def test_the_times_of_threads_add_up_to_their_processs() -> None:
    pid = os.getpid()
    before = process_cpu_s(pid)
    stop = threading.Event()

    def spin() -> None:
        while not stop.is_set():
            pass

    spinning = threading.Thread(target=spin)
    spinning.start()
    try:
        while process_cpu_s(pid) - before < 0.2:
            pass
        found = thread_cpu_s(pid)
    finally:
        stop.set()
        spinning.join()
    assert spinning.native_id in found
    assert found[spinning.native_id] > 0.0
    # Ended threads and ended children count for the process alone.
    assert sum(found.values()) <= process_cpu_s(pid) + 0.01


@pytest.mark.slow
def test_a_served_load_has_an_engine_that_computes_and_a_front_that_costs_less() -> None:
    costs = Costs.model_validate(COSTS)
    found = together.measure(costs, Path("models/target"), "float32", 1, core_count=1)
    assert found.concurrent == {1: 1.0}
    assert 0.0 < found.front_message_s < 0.05
    assert 0.0 <= found.front_request_s < 0.5
