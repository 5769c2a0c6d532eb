"""The simulator: equal scenarios give equal bytes, time goes forward, and nothing is lost."""

import os
import subprocess
import sys
from math import sqrt
from pathlib import Path
from random import Random

import pytest
from pydantic import ValidationError

from outrider_bench.commands.simulate import main
from outrider_bench.simulator.costs import load
from outrider_bench.simulator.events import Events
from outrider_bench.simulator.links import Link
from outrider_bench.simulator.scenario import Scenario
from outrider_bench.simulator.simulation import Simulation, simulate
from verifier_svc.engine.loop import Engine

ROOT = Path(__file__).parents[2]
DRAFTERS = [
    {"name": "good", "acceptance": 0.8, "jitter_ms": 1.0},
    {"name": "poor", "acceptance": 0.3, "round_trip_ms": 20},
]


def scenario(**more: object) -> Scenario:
    """Return two seconds of four requests and two drafters, with `more` settings."""
    given = {"costs": "assumed-gpu", "seconds": 2.0, "sequences": [4], "drafters": DRAFTERS}
    return Scenario.model_validate({**given, **more})


def test_two_runs_give_the_same_bytes_whatever_the_hash_seed(tmp_path: Path) -> None:
    settings = tmp_path / "scenario.yaml"
    settings.write_text(
        "costs: assumed-gpu\n"
        "seconds: 0.5\n"
        "sequences: [4]\n"
        "noise: 0.05\n"
        "hard_share: 0.2\n"
        "drafters:\n"
        "- {name: good, acceptance: 0.8, hard_acceptance: 0.2, jitter_ms: 1}\n"
        "- {name: poor, acceptance: [0.5, 0.3]}\n"
    )
    here, there = tmp_path / "here", tmp_path / "there"
    assert main([str(settings), "--out", str(here)]) == 0
    simulate = [sys.executable, "-m", "outrider_cli.main", "lab", "simulate"]
    command = [*simulate, str(settings), "--out", str(there)]
    seed = "1" if os.environ.get("PYTHONHASHSEED") == "0" else "0"
    environment = {**os.environ, "PYTHONHASHSEED": seed}
    subprocess.run(command, cwd=ROOT, env=environment, check=True, stdout=subprocess.DEVNULL)
    written = [(out / "simulation.json").read_bytes() for out in (here, there)]
    assert written[0] == written[1]


def test_each_actors_time_flows_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    simulation = Simulation(scenario(), 4)
    times: list[float] = []
    advance = Engine.advance

    def advance_and_note(engine: Engine) -> float | None:
        times.append(simulation.events.now)
        left = advance(engine)
        times.append(simulation.events.now)
        return left

    monkeypatch.setattr(Engine, "advance", advance_and_note)
    simulation.run()
    assert len(times) > 100
    assert times == sorted(times)


def test_a_link_keeps_the_order_and_shares_its_bandwidth() -> None:
    events = Events()
    arrived = []
    link = Link(events, Random(0), latency_s=0.010, jitter_s=0.005, bytes_per_s=1000.0)
    for number in range(50):
        link.send(10, lambda number=number: arrived.append((number, events.now)))  # type: ignore[misc]
    events.run(10.0)
    assert [number for number, _ in arrived] == list(range(50))
    # 500 bytes at 1,000 a second.
    assert 0.510 <= arrived[-1][1] <= 0.515


def test_a_chain_is_accepted_as_often_as_the_scenario_says() -> None:
    rate = 0.7
    drafters = [{"name": "d", "acceptance": rate}]
    outcome = simulate(scenario(seconds=20.0, draft_tokens="fixed:1", drafters=drafters), 4)
    counts = outcome.drafters["d"]
    drafted = counts["spec_decode_num_draft_tokens"]
    accepted = counts["spec_decode_num_accepted_tokens"]
    assert drafted > 1000
    # Five standard deviations.
    assert abs(accepted / drafted - rate) < 5 * sqrt(rate * (1 - rate) / drafted)


def test_all_requests_of_two_waves_are_answered_in_full() -> None:
    """At its end, the simulation itself raises an error if a page or a sequence is lost."""
    outcome = simulate(scenario(seconds=60.0, waves=2), 4)
    assert (outcome.request_count, outcome.sample.tokens, outcome.errors) == (8, 8 * 128, [])


def test_requests_of_a_verifier_that_leaves_are_finished_by_another() -> None:
    schedule = [
        {"at": 0.5, "who": "verifier-1", "what": "leave"},
        {"at": 0.9, "who": "verifier-1", "what": "join"},
        {"at": 1.5, "who": "poor", "what": "leave"},
    ]
    outcome = simulate(scenario(seconds=60.0, verifiers=2, waves=2, schedule=schedule), 4)
    assert outcome.resubmitted_count == 2
    assert (outcome.request_count, outcome.sample.tokens, outcome.errors) == (8, 8 * 128, [])


def test_a_drafter_that_hangs_is_not_waited_for_and_comes_back() -> None:
    drafters = [{"name": "d", "acceptance": 0.8}]
    schedule = [{"at": 0.5, "who": "d", "what": "hang", "seconds": 1.0}]
    hung = simulate(scenario(drafters=drafters, schedule=schedule), 4)
    well = simulate(scenario(drafters=drafters), 4)
    assert 0 < hung.drafters["d"]["proposed_tokens"] < well.drafters["d"]["proposed_tokens"]


def test_plain_decoding_takes_the_time_of_the_cost_table() -> None:
    costs = load("assumed-gpu")
    settings = scenario(prompt_tokens=[1], waves=1, client_ms=0, seconds=60.0)
    outcome = simulate(settings, 4, drafting=False)
    step_s = costs.forward_s(4, 4) + costs.host_step_s + 4 * costs.host_sequence_s
    assert outcome.sample.seconds == pytest.approx(128 * step_s, rel=0.02)


def test_only_steps_with_drafts_pay_what_drafts_cost_the_host() -> None:
    table = load("assumed-gpu")
    slow = table.model_copy(update={"drafted_sequence_s": 0.001})
    drafters = [{"name": "d", "acceptance": 0.8}]
    seconds = {
        (drafting, costs.drafted_sequence_s): simulate(
            scenario(costs=costs, drafters=drafters, waves=1, seconds=60.0),
            4,
            drafting=drafting,
        ).sample.seconds
        for costs in (table, slow)
        for drafting in (False, True)
    }
    assert seconds[False, 0.0] == seconds[False, 0.001]
    assert seconds[True, 0.001] > 1.05 * seconds[True, 0.0]


def test_a_verifiers_rate_ends_with_its_own_last_answer(tmp_path: Path) -> None:
    recording = tmp_path / "requests.jsonl"
    lines = [f'{{"prompt_tokens": 8, "output_tokens": {tokens}}}\n' for tokens in (40, 120)]
    recording.write_text("".join(lines))
    found = simulate(scenario(recording=recording, verifiers=2, drafters=[], sequences=[2]), 2)
    short, long = sorted(found.by_verifier.values(), key=lambda sample: sample.tokens)
    assert (short.tokens, long.tokens) == (40, 120)
    assert short.tokens_per_s == pytest.approx(long.tokens_per_s, rel=0.1)
    assert found.sample.seconds == long.seconds


def test_closed_arrivals_send_recorded_requests_in_turn(tmp_path: Path) -> None:
    recording = tmp_path / "requests.jsonl"
    lengths = [3, 5, 4, 6, 2]
    recording.write_text(
        "\n".join(f'{{"prompt_tokens": 8, "output_tokens": {length}}}' for length in lengths)
    )
    simulation = Simulation(scenario(recording=str(recording)), 2)
    outcome = simulation.run()
    requests = simulation.traffic.requests
    assert [len(request.received) for request in requests] == lengths
    assert [request.sent_at == 0.0 for request in requests] == [True, True, False, False, False]
    assert outcome.errors == []


@pytest.mark.parametrize("guess", ["+", "-", "."])
def test_recorded_guesses_decide_what_a_drafter_drafts(tmp_path: Path, guess: str) -> None:
    recording = tmp_path / "requests.jsonl"
    recording.write_text(
        f'{{"prompt_tokens": 8, "output_tokens": 200, "guesses": {{"good": "{200 * guess}"}}}}\n'
    )
    drafters = [{"name": "good", "acceptance": 0.5}]
    outcome = simulate(scenario(recording=str(recording), drafters=drafters, seconds=60.0), 1)
    counters = outcome.sample.counters
    drafted = counters.get("spec_decode_num_draft_tokens", 0)
    accepted = counters.get("spec_decode_num_accepted_tokens", 0)
    if guess == "+":
        assert accepted == drafted > 100
    else:
        # The drafter does not pay, so it only gets probes. A drafter without guesses answers no
        # probe.
        assert accepted == 0
        assert drafted < 20
        assert (counters.get("proposed_tokens", 0) > 0) == (guess == "-")


@pytest.mark.parametrize("requires", [False, True])
def test_a_drafter_that_requires_a_grammar_gets_requests_with_one(
    tmp_path: Path, *, requires: bool
) -> None:
    recording = tmp_path / "requests.jsonl"
    line = '{"prompt_tokens": 8, "output_tokens": 40, "grammar": %s}\n'
    recording.write_text(line % "false" + line % "true")
    drafters = [{"name": "d", "acceptance": 1.0, "requires_grammar": requires}]
    simulation = Simulation(scenario(recording=str(recording), drafters=drafters), 2)
    simulation.run()
    counts = [request.stats.draft_token_count for request in simulation.traffic.requests]
    assert [count > 0 for count in counts] == [not requires, True]


def test_a_recording_with_an_unknown_guess_is_refused_by_line(tmp_path: Path) -> None:
    recording = tmp_path / "requests.jsonl"
    recording.write_text('{"prompt_tokens": 8, "output_tokens": 2, "guesses": {"good": "+x"}}\n')
    with pytest.raises(ValueError, match=r"(?s)recording: line 1 of .*guesses"):
        Simulation(scenario(recording=str(recording)), 1)


def test_drafting_that_interferes_makes_forwards_longer() -> None:
    def forward_s(interference: float) -> float:
        drafters = [{"name": "near", "acceptance": 0.8, "interference": interference}]
        counters = simulate(scenario(drafters=drafters), 4).sample.counters
        return counters["step_phase_seconds.forward"] / counters["step_seconds_count"]

    assert forward_s(0.5) > 1.01 * forward_s(0.0)


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ({"bogus": 1}, "bogus"),
        ({"drafters": [{"name": "d", "acceptance": 1.5}]}, "less than or equal to 1"),
        (
            {"costs": "nothing"},
            "costs\n.*must be assumed-gpu, epyc-2-cores, gb200, h200 or a file, not 'nothing'",
        ),
        (
            {"schedule": [{"at": 1, "who": "x", "what": "join"}]},
            "schedule.who must be one of good, poor, verifier-1, not 'x'",
        ),
        (
            {"schedule": [{"at": 1, "who": "good", "what": "hang"}]},
            "seconds must be given with hang",
        ),
        ({"arrivals": "recorded"}, "recording must be given with recorded arrivals"),
        (
            {"arrivals": "poisson", "recording": []},
            "recording has no meaning with poisson arrivals",
        ),
        (
            {"waves": 2, "recording": []},
            "waves has no meaning without closed arrivals, nor with a recording",
        ),
        ({"drafters": [{"name": "d", "interference": 1.5}]}, "less than or equal to 1"),
    ],
)
def test_an_invalid_scenario_is_refused_by_setting(
    given: dict[str, object], complaint: str
) -> None:
    with pytest.raises(ValidationError, match=complaint):
        scenario(**given)
