"""Processes on shared cores: no work is lost, and each gets an equal share."""

import json
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider_bench.simulator.cores import Cores, Worker, equal_shares
from outrider_bench.simulator.costs import DIRECTORY, Costs, Forward
from outrider_bench.simulator.events import Events
from outrider_bench.simulator.scenario import Scenario
from outrider_bench.simulator.simulation import simulate

LONG = 400.0
CORE_SETS = st.sampled_from([frozenset({0}), frozenset({1}), frozenset({0, 1})])
PLACES = st.lists(st.tuples(CORE_SETS, st.integers(1, 2)), min_size=1, max_size=6)


def costs(concurrent: dict[int, float]) -> Costs:
    return Costs(
        source="made up for a test",
        measured=False,
        forwards=[Forward(sequences=1, tokens=1, seconds=1.0)],
        prompt_step_s=0.0,
        prompt_token_s=0.0,
        host_step_s=0.0,
        host_sequence_s=0.0,
        concurrent=concurrent,
    )


def rates(
    count: int, core_count: int, concurrent: dict[int, float] | None = None, pause: float = 0.0
) -> list[float]:
    """Seconds of work that each process gets done in a second.

    Processes work for a second, and again after a pause.
    """
    events = Events()
    cores = Cores(events, costs(concurrent or {}))
    done = [0] * count

    def work(number: int, worker: Worker) -> None:
        worker.spend(1.0)
        done[number] += 1
        events.after(pause, partial(work, number, worker))

    for number in range(count):
        worker = Worker(events, cores, frozenset(range(core_count)), is_target=True)
        events.at(0.1 * number, partial(work, number, worker))
    events.run(LONG)
    return [pieces / LONG for pieces in done]


@pytest.mark.parametrize(("count", "core_count"), [(1, 2), (2, 2), (3, 2), (4, 2), (8, 3)])
def test_each_process_gets_an_equal_share_of_the_cores(count: int, core_count: int) -> None:
    share = min(1.0, core_count / count)
    assert rates(count, core_count) == pytest.approx([share] * count, rel=0.05)


def test_processes_that_pause_use_the_cores_that_others_leave() -> None:
    # Two of three work on average, so that mostly each has a core.
    assert sum(rates(3, 2, pause=0.5)) == pytest.approx(1.75, abs=0.15)


def test_forwards_beside_each_other_are_as_much_slower_as_the_table_says() -> None:
    table = {1: 1.0, 2: 1.25}
    assert rates(2, 2, table) == pytest.approx([0.8, 0.8], rel=0.05)
    # Only two of four have cores at a time.
    assert sum(rates(4, 2, table)) == pytest.approx(1.6, rel=0.05)


def test_a_table_without_concurrent_forwards_slows_none_down() -> None:
    assert [costs({}).beside_forwards(count) for count in (1, 2, 8)] == [1.0, 1.0, 1.0]


def test_a_pinned_process_shares_only_with_those_that_need_its_core() -> None:
    pinned, free = (frozenset({0}), 1), (frozenset({0, 1}), 1)
    assert equal_shares((pinned, free)) == (1.0, 1.0)
    assert equal_shares((pinned, pinned, free)) == (0.5, 0.5, 1.0)
    assert equal_shares((pinned, free, free)) == pytest.approx([2 / 3] * 3)


@given(PLACES)
def test_no_set_of_cores_is_used_for_longer_than_it_is_there(
    places: list[tuple[frozenset[int], int]],
) -> None:
    shares = equal_shares(tuple(places))
    assert all(0.0 < share <= 1.0 for share in shares)
    for cores in (frozenset({0}), frozenset({1}), frozenset({0, 1})):
        used = [
            threads * share
            for (allowed, threads), share in zip(places, shares, strict=True)
            if allowed <= cores
        ]
        assert sum(used) <= len(cores) + 1e-9


def shared(**more: object) -> Scenario:
    """Four verifiers on two cores, with a drafter for each from one process there."""
    drafters = [
        {
            "name": f"d{i}",
            "verifier": f"verifier-{i}",
            "process": "one",
            "acceptance": 0.8,
            "cores": [0, 1],
        }
        for i in range(1, 5)
    ]
    given: dict[str, object] = {
        "costs": "assumed-gpu",
        "seconds": 5.0,
        "sequences": [4],
        "verifiers": 4,
        "target_cores": [0, 1],
        "drafters": drafters,
    }
    return Scenario.model_validate(given | more)


def test_four_verifiers_on_two_cores_are_as_fast_as_two() -> None:
    four = simulate(shared(), 4, drafting=False).sample.tokens
    two = simulate(shared(verifiers=2, drafters=[]), 2, drafting=False).sample.tokens
    alone = simulate(shared(target_cores=[]), 4, drafting=False).sample.tokens
    assert four == pytest.approx(two, rel=0.1)
    assert alone == pytest.approx(2 * four, rel=0.1)


def test_a_simulation_with_shared_cores_repeats_bit_for_bit() -> None:
    first, second = (simulate(shared(), 4).as_json() for _ in range(2))
    assert first == second


def test_a_verifier_that_decoded_alone_drafts_beside_others(tmp_path: Path) -> None:
    """Its plain steps were twice as fast then, so drafting seems a loss when the others come."""
    recording = tmp_path / "requests.jsonl"
    requests = [(0.0, 100), *[(2.0, 400)] * 4]
    lines = [
        {"time": time, "prompt_tokens": 16, "output_tokens": tokens} for time, tokens in requests
    ]
    recording.write_text("\n".join([json.dumps(line) for line in lines]))
    drafters = [
        {
            "name": f"d{i}",
            "verifier": f"verifier-{i}",
            "acceptance": 0.5,
            "slowness": 0.2,
            "joins_at": 1.5,
            "cores": [0, 1],
        }
        for i in range(1, 5)
    ]
    scenario = shared(
        drafters=drafters, arrivals="recorded", recording=recording, seconds=60.0, noise=0.1
    )
    samples = simulate(scenario, 4).by_verifier.values()
    # Without drafts a verifier takes 400 steps.
    assert max([sample.counters["step_seconds_count"] - 100 for sample in samples]) < 300


def test_gateways_on_the_verifiers_cores_take_their_time_from_them(tmp_path: Path) -> None:
    table = json.loads((DIRECTORY / "assumed-gpu.json").read_text())
    step_s = Costs.model_validate(table).forward_s(1, 1) + table["host_step_s"]
    path = tmp_path / "costs.json"
    path.write_text(json.dumps(table | {"front_message_s": step_s / 4, "front_request_s": 0.01}))

    def tokens(count: int, **more: object) -> int:
        scenario = shared(costs=str(path), verifiers=count, drafters=[], **more)
        return simulate(scenario, count, drafting=False).sample.tokens

    # A message takes a quarter of a step, so full cores give four fifths of their tokens.
    without, beside = tokens(4), tokens(4, gateway_cores=[0, 1])
    assert beside == pytest.approx(0.8 * without, rel=0.03)
    # One verifier leaves a core to the gateway.
    assert tokens(1, gateway_cores=[0, 1]) == pytest.approx(tokens(1), rel=0.01)


def test_forwards_beside_a_drafter_slow_each_other_down_less() -> None:
    """Of three processes on two cores, two forwards have 2/3 of a core each."""
    events = Events()
    cores = Cores(events, costs({1: 1.0, 2: 1.3}))
    done = [0, 0]

    def work(number: int, worker: Worker) -> None:
        worker.spend(1.0)
        done[number] += 1
        events.after(0.0, partial(work, number, worker))

    def draft(worker: Worker) -> None:
        worker.spend(1.0)
        events.after(0.0, partial(draft, worker))

    for number in range(2):
        worker = Worker(events, cores, frozenset({0, 1}), is_target=True)
        events.at(0.1 * number, partial(work, number, worker))
    events.at(0.2, partial(draft, Worker(events, cores, frozenset({0, 1}))))
    events.run(LONG)
    assert [pieces / LONG for pieces in done] == pytest.approx([2 / 3 / 1.1] * 2, rel=0.05)
