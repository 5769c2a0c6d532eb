"""A cell becomes the right scenario, and equal cells and profiles have equal predictions."""

import json
from pathlib import Path
from typing import Any

import pytest

from outrider_bench.commands.predict import main
from outrider_bench.experiment.cell_scenarios import check, scenario_of
from outrider_bench.experiment.predict import Predictor, table
from outrider_bench.experiment.recording import Recorder
from outrider_bench.experiment.records import DRAFTED, PLAIN, Folder, Measurement
from outrider_bench.experiment.spec import Cell, Experiment, load
from outrider_bench.simulator.recorded import RecordedRequest
from outrider_bench.simulator.scenario import Scenario
from outrider_bench.simulator.simulation import Simulation
from tests.experiment.made_up_profile import COSTS, made_up_profile

DRAFTERS = {
    "words": {"family": "ngram", "link": "wire"},
    "near": {"family": "model", "threads": 1},
    "pinned": {"family": "model", "threads": 1, "cores": "0"},
    "there": {"family": "model", "threads": 1, "host": "far"},
    "socket": {"family": "ngram", "transport": "unix"},
    "card": {"family": "model", "threads": 1, "device": "cuda"},
    "inside": {"family": "model", "transport": "in-process"},
}


RECORDERS: dict[str, Recorder] = {}
"""Recorders with the texts of target and draft model, which take seconds to record."""


def predictor(**more: Any) -> Predictor:
    """Return a predictor with a new profile and the recorded texts."""
    return Predictor([made_up_profile(**more)], RECORDERS)


def cell(**more: Any) -> Cell:
    given = {
        "name": "test",
        "target": {"threads": 1},
        "drafters": DRAFTERS,
        "links": {"wire": {"round_trip_ms": 20, "jitter_ms": 1, "mbit_s": 8, "loss": 0.01}},
        "workload": {"kinds": ["rewriting"], "output_tokens": 16, "waves": 1},
        "use": ["words"],
        **more,
    }
    [only] = Experiment.model_validate(given).cells()
    return only


def scenario(way: str = DRAFTED, **more: Any) -> Scenario:
    experiment = cell(**more).experiment
    recording = [RecordedRequest(prompt_tokens=1, output_tokens=1)] * 9
    return scenario_of(experiment, way, made_up_profile(), recording, 1)


def test_a_link_of_the_cell_is_added_to_the_profiles_round_trip() -> None:
    [drafter] = scenario().drafters
    # The profile has 0.5 ms over TCP, and the link adds 20 ms.
    assert drafter.round_trip_ms == pytest.approx(0.5 + 20)
    assert (drafter.jitter_ms, drafter.mbit_s, drafter.loss) == (1, 8, 0.01)


def test_a_drafter_in_the_verifiers_process_has_no_round_trip() -> None:
    [drafter] = scenario(use=["inside"]).drafters
    assert (drafter.in_process, drafter.round_trip_ms) == (True, 0.0)


def test_a_drafter_on_the_targets_core_takes_all_of_its_time_from_forwards() -> None:
    [drafter] = scenario(use=["pinned"], target={"threads": 1, "cores": "0"}).drafters
    assert (drafter.on_target_device, drafter.interference, drafter.slowness) == (True, 1.0, 2.0)


@pytest.mark.parametrize(
    ("name", "cores", "shares"),
    [("card", None, True), ("pinned", "0", True), ("near", "0", True), ("near", None, False)],
)
def test_the_simulated_engine_knows_which_drafter_shares_the_targets_device(
    name: str, cores: str | None, shares: bool
) -> None:
    found = scenario(use=[name], target={"threads": 1, "cores": cores})
    simulation = Simulation(found, 1)
    seen: list[bool] = []

    def look() -> None:
        drafting = simulation.verifiers["verifier-1"].engine.drafting
        seen.extend(each.on_target_device for each in drafting.roster.connected.values())

    simulation.events.at(0.1, look)
    simulation.run()
    assert seen == [shares]


def test_a_drafter_on_other_cores_slows_forwards_as_in_the_profiles_load() -> None:
    here, there = (scenario(use=[name]) for name in ("near", "there"))
    [drafter] = here.drafters
    assert (drafter.on_target_device, drafter.interference) == (False, 0.0)
    assert drafter.drafts_by == "model"
    assert here.costs.forward_s(1, 1) == pytest.approx(1.3 * 0.004)
    assert there.costs.forward_s(1, 1) == pytest.approx(0.004)


def test_plain_decoding_has_no_drafters_and_the_profiles_slow_down() -> None:
    found = scenario(PLAIN, workload={"batch": 8, "waves": 1})
    assert found.drafters == []
    costs = found.costs
    assert costs.forward_s(8, 8) == pytest.approx(1.1 * 0.006)
    # The host takes 0.1 ms for each sequence after a forward, and 0.05 ms before it.
    assert costs.host_sequence_s == pytest.approx(0.0001)
    assert costs.plan_sequence_s == pytest.approx(0.00005)


def test_a_synthetic_drafter_draws_from_its_acceptance() -> None:
    experiment = Experiment.model_validate(
        {
            "name": "x",
            "target": {"threads": 1},
            "drafters": {
                "s": {"family": "synthetic", "settings": {"acceptance": "0.9,0.5", "token_ms": 2}}
            },
            "use": ["s"],
        }
    )
    scenario = scenario_of(experiment, DRAFTED, made_up_profile(), [], 0)
    [drafter] = scenario.drafters
    assert (drafter.drafts_by, drafter.acceptance) == ("acceptance", {"": [0.9, 0.5]})
    cost = scenario.costs.drafting["synthetic s"]
    assert (cost.round_s, cost.token_s) == (0.0, {1: 0.002})


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ({"target": {"threads": 2}}, "target.threads: the profile has 1, the cell 2"),
        (
            {"target": {"threads": 1, "grown": True}},
            "target.model: the profile is of models/target",
        ),
        (
            {"target": {"threads": 1, "dtype": "bfloat16"}},
            "target.dtype: the profile is of float32",
        ),
        ({"workload": {"temperature": 0.5}}, "workload.temperature: only 0 can be predicted"),
        (
            {"drafters": {"tree": {"family": "suffix"}}, "use": ["tree"]},
            "drafters.tree.family: must be one of ngram, model, synthetic",
        ),
        (
            {"drafters": {"mtp": {"family": "head"}}, "use": ["mtp"]},
            "drafters.mtp.family: must be one of ngram, model, synthetic",
        ),
        (
            {"drafters": {"wide": {"family": "model", "threads": 2}}, "use": ["wide"]},
            "the profile has no model-2",
        ),
    ],
)
def test_a_field_that_a_profile_cannot_predict_is_named(
    given: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(ValueError, match=complaint):
        check(cell(**given).experiment, made_up_profile())


def test_a_prediction_repeats_bit_for_bit() -> None:
    given = {"use": ["words", "near"], "links": {"wire": {"round_trip_ms": 1, "jitter_ms": 1}}}
    first = predictor().measurement(cell(**given), DRAFTED)
    assert predictor().measurement(cell(**given), DRAFTED) == first
    assert first.sample.counters["spec_decode_num_drafts"] > 0
    assert first.links["wire"].up_bytes > 0


def test_plain_decoding_is_predicted_as_the_table_says() -> None:
    costs = {**COSTS, "forwards": [{"sequences": 1, "tokens": 1, "seconds": 0.004}]}
    found = predictor(costs=costs).measurement(cell(), PLAIN)
    sample = found.sample
    # Besides the forward, a step takes 0.15 ms on the host.
    step_s = sample.counters["step_seconds_sum"] / sample.counters["step_seconds_count"]
    assert step_s == pytest.approx(0.00415, rel=0.15)
    assert sample.tokens == sample.counters["generation_tokens"]


def test_predictions_are_written_beside_a_run_and_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, profile, run = tmp_path / "e.yaml", tmp_path / "p.json", Folder(tmp_path / "run")
    text = json.dumps(cell(use=[]).experiment.model_dump(mode="json"))
    file.write_text(text)
    made_up_profile().save(profile)
    run.begin({"experiment": json.loads(text)})
    predicted = predictor().measurement(cell(use=[]), PLAIN)
    sample = predicted.sample
    sample.seconds *= 1.1
    run.save("only", 0, Measurement(PLAIN, sample))
    assert main([str(file), "--profile", str(profile), "--validate", str(run.path)]) == 0
    [(_, written)] = run.measurements("only", predicted=True)
    assert written.sample.tokens == sample.tokens
    assert "Predictions of 1 speeds are off by 10.0 %" in capsys.readouterr().out


def test_a_run_of_another_experiment_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, profile, run = tmp_path / "e.yaml", tmp_path / "p.json", Folder(tmp_path / "run")
    file.write_text(json.dumps(cell().experiment.model_dump(mode="json")))
    made_up_profile().save(profile)
    run.begin({"experiment": {"name": "other"}})
    with pytest.raises(SystemExit):
        main([str(file), "--profile", str(profile), "--validate", str(run.path)])
    assert "is a run of another experiment" in capsys.readouterr().err


PLACES = load(Path(__file__).parents[2] / "bench/experiments/places.yaml")


@pytest.mark.parametrize(
    ("speeds", "spread", "marked"),
    [
        ([1.1, 1.4, 1.5, 1.0], 1.03, ["other-host"]),
        # The fastest place has 1.5, and 1.5 / 1.46 is less than the spread.
        ([1.1, 1.46, 1.5, 1.0], 1.05, ["other-cores", "other-host"]),
        # No gain is larger than the spread.
        ([1.0, 1.1, 1.15, 0.9], 1.2, []),
        ([0.9, 1.0, 1.01, 0.9], None, []),
    ],
)
def test_the_places_that_are_not_shown_to_be_slower_are_marked(
    speeds: list[float], spread: float | None, marked: list[str]
) -> None:
    more = {"conditions": {"load_averages": (0.1, 1.2), "spread": spread}} if spread else {}
    cells = [cell for cell in PLACES.cells() if cell.point["workload.batch"] == 8]
    rates = {(cell.key, PLAIN): 100.0 for cell in cells}
    rates |= {(cell.key, DRAFTED): 100 * x for cell, x in zip(cells, speeds, strict=True)}
    shown = table(cells, rates, predictor(**more))
    columns = {str(column.header): list(column.cells) for column in shown.columns}
    places = zip(columns["use"], columns[""], strict=True)
    assert [place for place, mark in places if mark] == marked
    assert columns["× plain"] == [f"{speed:.2f}" for speed in speeds]
    assert columns["spread"] == [f"{spread:.2f}" if spread else "–"] * 4
    assert columns["costs"] == ["assumed"] * 4


def test_a_prediction_answers_with_its_table_and_its_plot(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, profile = tmp_path / "e.yaml", tmp_path / "p.json"
    file.write_text(json.dumps(cell().experiment.model_dump(mode="json")))
    made_up_profile().save(profile)
    assert main([str(file), "--profile", str(profile), "--out", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "× plain" in said
    assert "Costs: made up for a test." in said
    [plot] = tmp_path.glob("test/predicted-*/speed.png")
    assert plot.read_bytes().startswith(b"\x89PNG")
