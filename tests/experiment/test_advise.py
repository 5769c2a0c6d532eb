"""`outrider lab advise` answers in words, shows the reasons, and names the errors of its input."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from made_up_profile import made_up_profile

from outrider.process.config import command
from outrider.process.usage import invoke
from outrider_bench.commands.advise import main
from outrider_bench.experiment import advice_text
from outrider_bench.experiment.acceptance import acceptances, lookups, share_of_right
from outrider_bench.experiment.advice import (
    LIMITS,
    PAYS,
    BatchAdvice,
    Place,
    Simulated,
    Simulator,
    Situation,
    advise,
    compare,
    halved,
    longest_that_pays,
)
from outrider_bench.experiment.calibration import Served, Step
from outrider_bench.experiment.profile_record import Conditions, Profile
from outrider_bench.experiment.situations import situation_of, situations_of
from outrider_bench.experiment.unmeasured import load_profile
from outrider_bench.settings import Question
from outrider_bench.simulator import costs

GPU = costs.load("assumed-gpu")
CPU = costs.load("epyc-2-cores")


def situation(
    link_ms: float, acceptance: float = 0.8, batch: int = 1, table: costs.Costs = GPU
) -> Situation:
    """A draft model whose round trip is 0.4 ms on the host."""
    near = Place("host", "on other cores", "model", 0.4)
    own = replace(near, key="target", name="on the target's cores", on_target_cores=True)
    far = replace(near, key="far", name="on another host", round_trip_ms=0.4 + link_ms)
    return Situation(table, table, (own, near, far), acceptance, batch)


@pytest.fixture(scope="module")
def gpu() -> list[BatchAdvice]:
    return [advise(situation(2.0, batch=batch)) for batch in (1, 32)]


@pytest.fixture(scope="module")
def distant() -> list[BatchAdvice]:
    return [advise(situation(500.0))]


def test_the_first_line_says_yes_with_both_speeds() -> None:
    assert advice_text.answer("model", [_fake(1, here=1.27, far=2.13)]) == (
        "Yes: a draft model 2 ms away brings 2.13 × plain decoding at batch 1 "
        "(1.27 × on this host)."
    )


@pytest.mark.slow
def test_the_first_line_says_no_half_a_second_away(distant: list[BatchAdvice]) -> None:
    line = advice_text.answer("ngram", distant)
    assert line.startswith("No: an n-gram drafter 500 ms away brings 1.00 × plain decoding")


def test_a_drafter_that_is_better_off_here_is_not_worth_moving() -> None:
    found = [_fake(1, here=2.13, far=1.27)]
    line = advice_text.answer("model", found)
    assert line.startswith("No: a draft model 2 ms away brings 1.27 × plain decoding")
    assert "2.13 × on this host" in line


def test_the_first_line_names_the_batches_that_pay() -> None:
    line = advice_text.answer("suffix", [_fake(1, far=1.10), _fake(8, far=1.0)])
    assert line.startswith(
        "Yes at batch 1, no at batch 8: the drafter suffix 2 ms away brings 1.10"
    )


def test_the_answer_repeats_the_load_under_which_the_profile_was_measured() -> None:
    conditions = Conditions(load_averages=(0.1, 7.4), spread=1.8)
    profile = made_up_profile().model_copy(update={"conditions": conditions})
    said = advice_text.as_json("model", [_fake(1)], profile)["source"]
    assert "7.4" in said
    assert "1.80 ×" in said


@pytest.mark.parametrize(
    ("here", "far", "spread", "verdict"),
    [
        (1.0, 1.3, 1.0, "yes"),
        (1.0, 1.3, 1.2, "yes"),
        (1.0, 1.3, 1.4, "cannot tell"),
        (1.3, 1.0, 1.2, "no"),
        (1.3, 1.0, 1.4, "cannot tell"),
        (1.0, 1.01, 1.0, "no"),
    ],
)
def test_a_verdict_needs_a_difference_larger_than_the_spread(
    here: float, far: float, spread: float, verdict: str
) -> None:
    found = _fake(1, here=here, far=far)
    found.situation = replace(found.situation, spread=spread)
    assert found.verdict == verdict
    line = advice_text.answer("model", [found])
    assert line.startswith(f"{verdict.capitalize()}: a draft model 2 ms away brings")
    reason = f"Equal computations differed by {spread:.2f} × while the costs were measured."
    assert line.endswith(reason) == (verdict == "cannot tell")


def _profile(
    spread: float, served: float | None = None, tokens: float = 3.0, load: float = 0.1
) -> Profile:
    """A profile whose drafter takes much from forwards on its host.

    Its own load ran at `served` × plain decoding, and committed `tokens` in a forward.
    """
    profile = made_up_profile(acceptance={"model": 0.8})
    hinders = [
        each.model_copy(update={"interference": 0.9}) if each.way == "model" else each
        for each in profile.serving
    ]
    common = {"batch": 1, "first_token_s": 0.01, "client_s": 0.001}
    loads = [("plain", 100.0, 1.0), *([("model", 100.0 * served, tokens)] if served else [])]
    return profile.model_copy(
        update={
            "serving": hinders,
            "conditions": Conditions(load_averages=(load, load + 1.0), spread=spread),
            "served": [
                Served(
                    way=way,
                    tokens_per_s=rate,
                    tokens_per_sequence_step=each,
                    step=STEP,
                    **common,
                )
                for way, rate, each in loads
            ],
        }
    )


STEP = Step.model_validate(
    {name: 1.0 if name in ("forward_s", "sequences") else 0.0 for name in Step.model_fields}
)
NEAR = ["--round-trip-ms", "0.1"]
PROFILES: dict[str, tuple[Profile | str, list[str], str]] = {
    # The other host is spared what the drafter takes from forwards on this one.
    "quiet": (_profile(1.03, 1.5), NEAR, "yes"),
    # The same, but nothing under a factor of four is known.
    "busy": (_profile(4.0, 1.5, load=9.0), NEAR, "cannot tell"),
    # Five forwards fit into a round trip.
    "far": (_profile(1.03, 1.5), ["--round-trip-ms", "400"], "no"),
    # The draft model is nine times as fast on the GPU as on any Grace CPU.
    "GB200, assumed": (
        "gb200",
        [*NEAR, "--acceptance", "0.7", "--drafter", "model-on-target", "--cpu-drafter", "model"],
        "no",
    ),
    # Three tokens in a forward cannot make it five times as fast.
    "contradictory, too fast": (_profile(1.03, 5.0), NEAR, "cannot tell"),
    # By its costs the drafter brings much, by its own load it does harm.
    "contradictory, opposite": (_profile(1.03, 0.5), NEAR, "cannot tell"),
}
"""By name: a profile or a cost table, further flags, and the verdict by hand."""


@pytest.mark.parametrize("name", PROFILES)
def test_verdicts_are_those_made_by_hand(name: str, tmp_path: Path) -> None:
    costs, flags, verdict = PROFILES[name]
    if isinstance(costs, Profile):
        costs.save(tmp_path / "profile.json")
        costs = str(tmp_path / "profile.json")
    asked = _question("--costs", costs, "--batch", "1", *flags)
    [situation] = situations_of(asked, load_profile(costs, "costs"))
    found = compare(situation, Simulator(situation))
    assert found.verdict == verdict
    assert bool(found.doubt) == name.startswith("contradictory")
    said = advice_text.answer("model", [found])
    assert ("contradicts itself" in said) == name.startswith("contradictory")


def _question(*flags: str) -> Question:
    asked: list[Question] = []
    given = ["--costs", "unread", "--round-trip-ms", "2", *flags]
    invoke(command(Question, "advise", asked.append), "advise", given)
    return asked[0]


def _fake(batch: int, *, here: float = 1.0, far: float = 1.1) -> BatchAdvice:
    """Made-up speeds, with a link of 2 ms."""
    asked = situation(2.0, batch=batch)
    found = BatchAdvice(asked, 100.0, break_even_round_trip_ms=math.inf, break_even_acceptance=0.5)
    found.halved = dict.fromkeys(LIMITS, 1.0)
    for place in asked.places:
        speed = far if place is asked.far else here
        found.simulated[place.key] = Simulated(speed, 100.0 * speed, 1.0, 0.0)
    return found


@pytest.mark.parametrize("edge", [3.0, 40.0])
def test_searches_find_the_edge(edge: float) -> None:
    def falling(value: float) -> float:
        return 2.0 if value <= edge else 1.0

    found = longest_that_pays(falling, 0.05, 1000.0)
    assert found is not None
    assert edge / 1.2 <= found <= edge
    assert longest_that_pays(falling, 0.05, edge) == math.inf
    assert longest_that_pays(falling, edge + 1, 1000.0) is None


@pytest.mark.slow
def test_a_link_of_half_a_second_is_the_limit(distant: list[BatchAdvice]) -> None:
    [found] = distant
    assert found.break_even_acceptance is None
    # Both are near; which of them is faster is the planner's matter.
    assert found.best in ("host", "target")


@pytest.mark.slow
def test_drafting_stops_to_pay_beyond_the_break_even_round_trip(gpu: list[BatchAdvice]) -> None:
    longest = gpu[0].break_even_round_trip_ms
    assert longest is not None
    assert 2.0 < longest < 500.0
    assert _far_speed(situation(2 * longest)) < PAYS <= _far_speed(situation(longest / 2))


@pytest.mark.slow
def test_drafting_pays_from_the_break_even_acceptance_on(gpu: list[BatchAdvice]) -> None:
    lowest = gpu[0].break_even_acceptance
    assert lowest is not None
    assert 0.0 < lowest < 0.8
    above, below = situation(2.0, lowest + 0.1), situation(2.0, lowest / 2)
    assert _far_speed(above) >= PAYS > _far_speed(below)


def _far_speed(asked: Situation) -> float:
    return Simulator(asked).run(asked.far, asked.acceptance).speed


@pytest.mark.slow
def test_json_has_all_of_it_and_no_infinity(
    gpu: list[BatchAdvice], distant: list[BatchAdvice]
) -> None:
    for found in (gpu, distant, [_fake(1)]):
        text = json.dumps(advice_text.as_json("model", found, made_up_profile()), allow_nan=False)
        data = json.loads(text)
        assert data["answer"] == advice_text.answer("model", found)
        assert [batch["batch"] for batch in data["batches"]] == [batch.batch for batch in found]
        assert set(data["batches"][0]["halved"]) == set(LIMITS)


@pytest.mark.slow
def test_the_limit_is_the_one_whose_halving_brings_most() -> None:
    slow = GPU.drafting["model"].model_copy(update={"token_s": {1: 0.008}})
    asked = situation(0.0, 0.95)
    cases = {
        "the drafter's speed": replace(
            asked, costs=GPU.model_copy(update={"drafting": {"model": slow}})
        ),
        "the link": situation(30.0, 0.95),
        "acceptance": situation(0.0, 0.5),
        "the target's saturation": situation(0.0, 0.95, 32, CPU),
    }
    for limit, case in cases.items():
        speeds = halved(Simulator(case), case.far, case.acceptance)
        assert max(speeds, key=lambda name: speeds[name]) == limit


# --- input ---


def test_a_cost_table_is_read_by_name_and_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "table.json"
    file.write_text(GPU.model_dump_json())
    for name in ("assumed-gpu", str(file)):
        assert load_profile(name, "costs").costs.model_dump() == GPU.model_dump()


def test_a_cost_table_s_own_link_is_the_round_trip_on_its_host() -> None:
    profiles = [load_profile(name, "costs") for name in ("gb200", "assumed-gpu")]
    found = [1000 * profile.serving_at("model", 1).round_trip_s for profile in profiles]
    assert found == pytest.approx([0.23, 0.4])


def test_a_cost_table_s_host_works_as_long_beside_drafters() -> None:
    profile = load_profile("assumed-gpu", "costs")
    for way in ("plain", "model"):
        found = profile.costs_at(way, 4)
        times = (found.host_step_s, found.host_sequence_s, found.plan_step_s)
        assert times == pytest.approx((GPU.host_step_s, GPU.host_sequence_s, GPU.plan_step_s))


def test_a_profile_gives_the_costs_of_a_machine_that_serves(tmp_path: Path) -> None:
    file = tmp_path / "profile.json"
    made_up_profile(acceptance={"model": 0.75}).save(file)
    profile = load_profile(str(file), "costs")
    one, many = situations_of(_question("--batch", "1,8"), profile)
    # Forwards of eight sequences take 10 % longer while the machine serves.
    assert one.plain_costs.forward_s(1, 1) == pytest.approx(0.004)
    assert many.plain_costs.forward_s(8, 8) == pytest.approx(0.0066)
    assert (one.near.round_trip_ms, one.near.interference) == pytest.approx((0.5, 0.2))
    assert one.places[0].slowness == 2.0
    assert (one.acceptance, many.acceptance) == (0.75, 0.75)
    with pytest.raises(ValueError, match="acceptance: give --acceptance"):
        situation_of(_question("--drafter", "ngram"), profile, 1)
    # A draft model elsewhere on the machine has the costs of serving of one on one core.
    wide = situation_of(_question("--drafter", "model-72"), profile, 1)
    assert wide.near.interference == pytest.approx(0.2)


def test_lookups_guess_from_the_text_before() -> None:
    # The text repeats itself behind 5 and 6; nothing is known behind 9, and 4 was never there.
    assert lookups([5, 6, 7, 8, 9], [5, 6, 7, 8, 4]) == ".+++-"
    assert lookups([1], [2, 3]) == ".."


def test_the_share_of_right_guesses_is_over_all_tokens() -> None:
    assert share_of_right(["+.-+", "++1+++"]) == pytest.approx(0.7)
    assert share_of_right([]) == 0.0


@pytest.mark.slow
def test_drafters_of_the_bundled_pair_guess_many_tokens_right() -> None:
    found = acceptances(Path("models/target"), Path("models/draft"), "float32")
    assert 0.4 < found["model"] < 0.95
    assert 0.2 < found["ngram"] < 0.95


def test_a_drafter_on_another_host_costs_the_target_no_messages() -> None:
    found = situation_of(_question("--acceptance", "0.8"), made_up_profile(), 1)
    costs = [found.costs.drafting[place.cost].message_s for place in (found.near, found.far)]
    assert costs == pytest.approx([0.00005, 0.0])


BASE = ["--costs", "assumed-gpu", "--round-trip-ms", "2", "--acceptance", "0.8"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (BASE[2:], "costs: must be given"),
        (BASE[:2], "round-trip-ms: must be given"),
        (BASE[:4], "acceptance: give --acceptance, from 0 to 0.99"),
        ([*BASE, "--acceptance", "1.2"], "acceptance: must be less than or equal to 0.99"),
        ([*BASE, "--round-trip-ms", "2000"], "round-trip-ms: must be less than or equal to 1000"),
        ([*BASE, "--batch", "0"], "batch.0: must be greater than or equal to 1"),
        ([*BASE, "--batch", "512"], "batch.0: must be less than or equal to 256"),
        ([*BASE, "--costs", "h900"], "costs: must be assumed-gpu, "),
        ([*BASE, "--costs", "nowhere.json"], "costs: must be assumed-gpu, "),
        ([*BASE, "--drafter", "eagle"], "drafter: must be one of model, ngram of the cost table"),
        ([*BASE, "--cpu-drafter", "eagle"], "cpu-drafter: must be one of model, ngram"),
        ([*BASE, "--speed", "2"], "there is no setting --speed"),
    ],
)
def test_wrong_input_is_named_with_its_limit(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "costs: {path} is not JSON"),
        ('{"costs": {}}', "costs: {path}: machine: Field required"),
        ('{"forwards": []}', "costs: {path}: source: Field required"),
    ],
)
def test_a_broken_profile_is_named_with_its_field(
    text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "profile.json"
    path.write_text(text)
    with pytest.raises(SystemExit) as caught:
        main(["--costs", str(path), *BASE[2:]])
    assert caught.value.code == 2
    assert message.format(path=path) in capsys.readouterr().err


def test_the_command_prints_its_advice_as_json(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        "outrider_bench.experiment.advice.advise", lambda situation, tell: _fake(situation.batch)
    )
    assert main([*BASE, "--batch", "1", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["answer"] == advice_text.answer("model", [_fake(1)])
    assert printed["batches"][0]["batch"] == 1
