"""The production families in virtual time: lookups, a draft model's branches, shared processes."""

import json
from pathlib import Path
from typing import Any

import pytest

from outrider_bench.simulator.production import _RecordedForwards
from outrider_bench.simulator.scenario import Scenario
from outrider_bench.simulator.simulation import Outcome, Simulation, simulate

PHRASE = [11, 12, 13, 14, 15, 16, 17, 18]


def outcome_of(
    tmp_path: Path, requests: list[dict[str, Any]], drafter: dict[str, Any], **more: Any
) -> Outcome:
    """Simulate recorded requests one after the other, with one drafter."""
    return simulate(scenario_of(tmp_path, requests, [drafter], **more), 1)


def scenario_of(
    tmp_path: Path, requests: list[dict[str, Any]], drafters: list[dict[str, Any]], **more: Any
) -> Scenario:
    """Return a scenario of recorded requests and these drafters."""
    recording = tmp_path / "requests.jsonl"
    recording.write_text("\n".join(map(json.dumps, requests)))
    given = {
        "costs": "assumed-gpu",
        "seconds": 600.0,
        "sequences": [1],
        "recording": str(recording),
        "drafters": drafters,
        **more,
    }
    return Scenario.model_validate(given)


def text(prompt: list[int], output: list[int], **guesses: str) -> dict[str, Any]:
    """Return a recorded request. Its `output_ids` go on for 32 tokens beyond `output`."""
    tail = list(range(5000, 5032))
    sizes = {"prompt_tokens": len(prompt), "output_tokens": len(output)}
    return {**sizes, "prompt_ids": prompt, "output_ids": output + tail, "guesses": guesses}


LOOKUP = {"name": "ngram", "drafts_by": "lookup", "cost": "ngram", "round_trip_ms": 0.5}
MODEL = {"name": "model", "drafts_by": "model", "round_trip_ms": 0.5}


def test_lookups_find_what_a_text_repeats(tmp_path: Path) -> None:
    repeated = outcome_of(tmp_path, [text([1, *PHRASE * 3], PHRASE * 12)], LOOKUP)
    novel = outcome_of(tmp_path, [text(list(range(100, 125)), list(range(1000, 1096)))], LOOKUP)
    assert repeated.sample.counters["spec_decode_num_accepted_tokens"] > 40
    assert novel.sample.counters.get("spec_decode_num_accepted_tokens", 0.0) == 0.0


def test_a_pool_of_all_requests_serves_the_second_one(tmp_path: Path) -> None:
    output = list(range(1000, 1096))
    requests = [text([1, 2, 3, 1000], output), text([4, 5, 6, 1000], output)]
    own = outcome_of(tmp_path, requests, LOOKUP)
    shared = outcome_of(tmp_path, requests, {**LOOKUP, "is_public_pool": True})
    assert own.sample.counters.get("spec_decode_num_accepted_tokens", 0.0) == 0.0
    assert shared.sample.counters["spec_decode_num_accepted_tokens"] > 40


def test_a_draft_models_alternatives_are_branches_that_hit(tmp_path: Path) -> None:
    output = list(range(1000, 1192))
    # One guess in four is wrong. With "1" the true token is the first alternative to that guess.
    # Steps verify only chains here, because a branch that a step verifies needs no lookup.
    wrong, second = (
        outcome_of(tmp_path, [text([1, 2, 3], output, model=guesses)], MODEL, draft_trees=False)
        for guesses in ("+++-" * 60, "+++1" * 60)
    )
    assert wrong.sample.counters.get("draft_lookups.branch", 0.0) == 0.0
    assert second.sample.counters["draft_lookups.branch"] > 3
    assert second.sample.seconds < wrong.sample.seconds


def test_a_forward_that_fails_ends_the_simulation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(_RecordedForwards, "_score", fail)
    with pytest.raises(ZeroDivisionError):
        outcome_of(tmp_path, [text([1, 2, 3], [1000, 1001], model="++")], MODEL)


def test_connections_of_one_process_share_its_forwards(tmp_path: Path) -> None:
    output = list(range(1000, 1096))
    requests = [text([1, 2, 3 + i], output, model="+" * 128) for i in range(2)]
    slow = {**MODEL, "family": "model", "slowness": 4.0}

    def forwards(**more: str) -> list[float]:
        drafters = [
            {**slow, **more, "name": f"model-{i}", "verifier": f"verifier-{i}"} for i in (1, 2)
        ]
        scenario = scenario_of(tmp_path, requests, drafters, verifiers=2, sequences=[2])
        simulation = Simulation(scenario, 2)
        assert simulation.run().sample.tokens == 2 * 96
        return [actor.computed_s for actor in simulation.drafters.values()]

    apart = forwards()
    together = forwards(process="one")
    # Each connection counts all forwards of its process, and one forward serves both connections.
    assert together[0] == together[1]
    assert max(apart) < together[0] < sum(apart)


def test_warm_up_requests_are_not_measured(tmp_path: Path) -> None:
    requests = [text([1, *PHRASE * 3], PHRASE * 6), text([2, *PHRASE * 3], PHRASE * 4)]
    outcome = outcome_of(tmp_path, requests, LOOKUP, warm_up=1)
    assert (outcome.request_count, outcome.sample.tokens) == (1, 32)
    assert outcome.sample.counters["generation_tokens"] == 32
    [(first, last, _)] = outcome.sample.requests
    assert 0.0 < first < last == outcome.sample.seconds
