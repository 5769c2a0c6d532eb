"""A profile's file, the arithmetic of the calibration load, and the fit to it."""

import json
from pathlib import Path

import pytest

from outrider_bench.commands.profile import main
from outrider_bench.experiment.calibration import Served, Step
from outrider_bench.experiment.made_profiles import load_profile
from outrider_bench.experiment.serving import Serving, busy, costs_of_serving, expected_s
from outrider_bench.simulator import costs
from outrider_bench.simulator.costs import Costs
from tests.experiment.made_up_profile import COSTS, made_up_profile


def test_a_profiles_file_round_trips(tmp_path: Path) -> None:
    profile = made_up_profile()
    profile.save(tmp_path / "profile.json")
    assert load_profile(str(tmp_path / "profile.json"), "--profile") == profile


@pytest.mark.parametrize(
    ("place", "complaint"),
    [
        ((), "bogus: there is no such field"),
        (("costs",), r"costs\.bogus: there is no such field"),
        (("serving", 0), r"serving\.0\.bogus: there is no such field"),
    ],
)
def test_an_unknown_key_in_a_profile_is_refused(
    tmp_path: Path, place: tuple[str | int, ...], complaint: str
) -> None:
    data = made_up_profile().model_dump(mode="json")
    inner = data
    for name in place:
        inner = inner[name]
    inner["bogus"] = 1
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(data))
    with pytest.raises(ValueError, match=complaint):
        load_profile(str(path), "--profile")


def test_a_missing_profile_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"--profile: must be .* or a file, not .*none\.json"):
        load_profile(str(tmp_path / "none.json"), "--profile")


def test_a_serving_machines_table_has_the_slow_down_of_each_batch() -> None:
    one = Serving(
        way="plain",
        batch=1,
        sequences=1.0,
        slowdown=1.2,
        before_s=0.0001,
        after_s=0.0003,
        client_s=0.0,
    )
    many = Serving(
        way="plain",
        batch=8,
        sequences=8.0,
        slowdown=1.4,
        before_s=0.0008,
        after_s=0.001,
        client_s=0.0,
    )
    table = busy(Costs.model_validate(COSTS), one, many)
    assert table.forward_s(1, 1) == pytest.approx(1.2 * 0.004)
    assert table.forward_s(8, 8) == pytest.approx(1.4 * 0.006)
    assert table.host_step_s + 8 * table.host_sequence_s == pytest.approx(0.001)
    assert table.plan_step_s + table.plan_sequence_s == pytest.approx(0.0001)


def test_a_mean_steps_forward_is_priced_with_its_drafts_and_prompts() -> None:
    given = dict.fromkeys(Step.model_fields, 0.0) | {
        "forward_s": 1.0,
        "sequences": 1.0,
        "draft_tokens": 8.0,
        "prompt_tokens": 10.0,
    }
    assert expected_s(Step.model_validate(given), Costs.model_validate(COSTS)) == pytest.approx(
        0.005 + 10 * 0.00002
    )


def _load(way: str, **step: float) -> Served:
    """Return a load of one sequence, whose draft tokens took 0.6 ms each."""
    zeros = dict.fromkeys(Step.model_fields, 0.0) | {"sequences": 1.0, "before_s": 0.0001}
    return Served(
        way=way,
        batch=1,
        tokens_per_s=100.0,
        client_s=0.001,
        round_trip_s=0.0005,
        draft_token_s=0.0006,
        step=Step.model_validate(zeros | step),
    )


def test_the_costs_of_serving_are_what_a_load_took_beyond_the_idle_machine() -> None:
    plain = _load("plain", forward_s=0.006, wait_s=0.0002)
    model = _load("model", forward_s=0.01, draft_tokens=8, drafts=1, answer_s=0.0063, wait_s=0.1)
    one, other = costs_of_serving([plain, model], Costs.model_validate(COSTS))
    assert one.slowdown == pytest.approx(1.5)
    assert one.round_trip_s == 0.0
    # A step with eight draft tokens takes 5 ms on the idle machine, and a draft token 0.3 ms.
    assert (other.slowdown, other.slowness) == pytest.approx((2.0, 2.0))
    # The drafter's answer took 1 ms longer than the round trip and eight draft tokens.
    assert (other.round_trip_s, other.jitter_s) == pytest.approx((0.0005, 0.001))
    # The wait for drafts is no work of the host.
    assert one.before_s == other.before_s == pytest.approx(0.0003)


GPU = costs.load("assumed-gpu")


def test_a_cost_table_is_read_by_name_and_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "table.json"
    file.write_text(GPU.model_dump_json())
    for name in ("assumed-gpu", str(file)):
        assert load_profile(name, "--profile").costs.model_dump() == GPU.model_dump()


def test_a_cost_table_s_own_link_is_the_round_trip_on_its_host() -> None:
    profiles = [load_profile(name, "--profile") for name in ("gb200", "assumed-gpu")]
    found = [1000 * profile.serving_at("model", 1).round_trip_s for profile in profiles]
    assert found == pytest.approx([0.23, 0.4])


def test_a_cost_table_s_host_works_as_long_beside_drafters() -> None:
    profile = load_profile("assumed-gpu", "--profile")
    for way in ("plain", "model"):
        found = profile.costs_at(way)
        times = (found.host_step_s, found.host_sequence_s, found.plan_step_s)
        assert times == pytest.approx((GPU.host_step_s, GPU.host_sequence_s, GPU.plan_step_s))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "--profile: {path} is not JSON"),
        ('{"costs": {}}', "--profile: {path}: machine: Field required"),
        ('{"forwards": []}', "--profile: {path}: source: Field required"),
    ],
)
def test_a_broken_profile_is_named_with_its_field(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=message.format(path=path)):
        load_profile(str(path), "--profile")


def test_serving_is_measured_with_one_draft_thread(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--draft-threads", "72"])
    assert "draft_threads must have 1 among them" in capsys.readouterr().err


def test_a_directory_that_is_no_model_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--target", "nowhere"])
    assert "target must be a directory of a model, which nowhere is not" in capsys.readouterr().err
