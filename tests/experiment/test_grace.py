"""The experiment with a Grace CPU fits the recorded board, and is predicted without a board."""

from pathlib import Path

import pytest

from drafter_svc.placement import Topology, plan
from outrider_bench.commands.run import main as run
from outrider_bench.experiment.cell_scenarios import check, cost_of
from outrider_bench.experiment.made_profiles import TOPOLOGIES, profile_of
from outrider_bench.experiment.predict import Predictor
from outrider_bench.experiment.records import DRAFTED, PLAIN
from outrider_bench.experiment.spec import Cell, Experiment, drafters_of, load
from outrider_bench.simulator import costs
from tests.experiment.made_up_profile import made_up_profile
from tests.sys_trees import gb200

FILE = Path(__file__).parents[2] / "bench/experiments/grace.yaml"
GRACE = load(FILE)


def test_the_profile_has_the_cores_of_the_recorded_board(tmp_path: Path) -> None:
    recorded = Topology.read(gb200(tmp_path))
    with_cores = {node: cores for node, cores in recorded.nodes.items() if cores}
    assert TOPOLOGIES["gb200"] == with_cores
    assert profile_of("gb200", GRACE.target).cores == recorded.online


@pytest.mark.parametrize("name", ["grace", "other-host"])
def test_drafters_on_grace_fit_the_recorded_board(name: str, tmp_path: Path) -> None:
    drafter = GRACE.drafters[name]
    chosen = plan(drafter.cores, drafter.numa_node, drafter.threads, gb200(tmp_path))
    assert (len(chosen.cores), chosen.numa_node, chosen.threads) == (72, 0, 72)


def test_no_drafter_runs_on_the_verifiers_cores() -> None:
    assert GRACE.target.cores == "72-143"
    assert all(drafter.cores in (None, "0-71") for drafter in GRACE.drafters.values())


def test_the_table_prices_every_drafter_of_the_experiment() -> None:
    profile = profile_of("gb200", GRACE.target)
    assert profile.costs.source == costs.load("gb200").source
    for drafter in GRACE.drafters.values():
        assert cost_of(drafter, profile.cores) in profile.costs.drafting


MODELS = {
    "model-0.5b": (0.49e9, 24 * 2 * 64),
    "model": (1.23e9, 16 * 8 * 64),
    "model-1.5b": (1.54e9, 28 * 2 * 128),
    "model-3b": (3.21e9, 28 * 8 * 128),
}
"""For each draft model of the table: its parameters, and how many numbers a token's keys have."""
GRACE_CPU = (0.74 * 410e9, 0.8 * 72 * 3.1e9 * 32)
GPU = (0.8 * 8e12, 0.8 * 2500e12)
"""The bytes and operations per second that the hardware attains."""
INT8 = 1.4
"""A draft model's time in bfloat16 divided by its time in int8, both without a context."""


BESIDE_H200 = {
    "135m": (135e6, 30 * 3 * 64),
    "0.4b": (362e6, 32 * 5 * 64),
    "0.5b": (0.49e9, 24 * 2 * 64),
}
"""The same numbers for the draft models of the table `h200`."""
CPUS = {"xeon": (8 * 14e9, 0.8 * 16 * 2.6e9 * 64), "grace": GRACE_CPU}


def check_draft_times(
    cost: costs.DraftingCost,
    parameters: float,
    keys: int,
    bytes_s: float,
    rate: float,
    faster: float,
) -> None:
    """Check a draft model's times against a bandwidth and a rate.

    A forward reads the weights once, and the keys and values of 1,024 tokens of each sequence. A
    token's keys have `keys` numbers, and so have its values; a number has two bytes. Weights are
    read and multiplied `faster` times as fast as in bfloat16. The host takes 0.3 ms.
    """
    assert cost.prompt_token_s == pytest.approx(2 * parameters / rate / faster, rel=1e-3)
    for count, seconds in cost.token_s.items():
        read_s = 2 * (parameters / faster + count * 2 * keys * 1024) / bytes_s
        computed_s = 2 * parameters * count / rate / faster
        assert seconds == pytest.approx(max(read_s, computed_s) + 0.0003, rel=1e-3)


@pytest.mark.parametrize("name", MODELS)
def test_draft_times_are_those_of_the_published_bandwidths_and_rates(name: str) -> None:
    ways = ((name, GRACE_CPU, 1), (f"{name}-int8", GRACE_CPU, INT8), (f"{name}-on-target", GPU, 1))
    for way, hardware, faster in ways:
        check_draft_times(costs.load("gb200").drafting[way], *MODELS[name], *hardware, faster)


@pytest.mark.parametrize("size", BESIDE_H200)
@pytest.mark.parametrize("cpu", CPUS)
def test_draft_times_beside_an_h200_are_those_of_the_cpus_bandwidths(cpu: str, size: str) -> None:
    drafting = costs.load("h200").drafting
    hardware = CPUS[cpu]
    check_draft_times(drafting[f"{cpu}-{size}"], *BESIDE_H200[size], *hardware, 1)
    check_draft_times(drafting[f"{cpu}-{size}-int8"], *BESIDE_H200[size], *hardware, INT8)


def test_a_profile_without_a_machine_says_so() -> None:
    profile = profile_of("gb200", GRACE.target)
    assert not profile.costs.measured
    assert profile.costs.source.startswith("assumed, not measured; ")
    assert profile.costs.source.count("https://") >= 4
    assert profile.machine["host"] == "gb200, assumed"
    assert profile.served == []


def test_an_unknown_cost_table_is_named() -> None:
    with pytest.raises(ValueError, match=r"costs: must be .*gb200.* or a file, not 'abacus'"):
        profile_of("abacus", GRACE.target)


def test_a_way_of_drafting_that_the_table_lacks_is_named() -> None:
    [cell] = _cells("gpu", 1)
    strange = cell.experiment.drafters["gpu"].model_copy(update={"cost": "abacus"})
    drafters = {**cell.experiment.drafters, "gpu": strange}
    experiment = cell.experiment.model_copy(update={"drafters": drafters})
    with pytest.raises(
        ValueError, match=r"drafters\.gpu\.cost: must be one of model, model-0\.5b, "
    ):
        Predictor([profile_of("gb200", GRACE.target)]).measurement(Cell({}, experiment), DRAFTED)


def test_a_profile_of_the_board_fits_the_experiment_that_is_run_there(tmp_path: Path) -> None:
    profile = made_up_profile(dtype="bfloat16", machine={"host": "board", "cores": [*range(144)]})
    way = profile.costs.drafting["model"]
    drafting = profile.costs.drafting | {"model-72": way, "model-on-target": way}
    costs_there = profile.costs.model_copy(update={"drafting": drafting})
    there = profile.model_copy(update={"costs": costs_there})
    prices = {}
    for cell in load(FILE.with_name("grace-here.yaml")).cells():
        check(cell.experiment, there)
        [(name, drafter)] = drafters_of(cell.experiment)
        prices[name] = cost_of(drafter, there.cores)
        chosen = plan(drafter.cores, drafter.numa_node, drafter.threads, gb200(tmp_path / cell.key))
        assert set(chosen.cores).isdisjoint(range(72, 144))
    assert prices == {"grace": "model-72", "gpu": "model-on-target"}


def test_hardware_that_is_not_here_is_not_run(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        run([str(FILE)])
    assert caught.value.code == 2
    assert "costs is for hardware that is not here; predict this file" in capsys.readouterr().err


@pytest.mark.slow
def test_the_gpu_drafts_faster_than_grace_and_grace_faster_than_none() -> None:
    predictor = Predictor([profile_of("gb200", GRACE.target)])
    speeds = {
        (name, way): predictor.measurement(cell, way).sample.tokens_per_s
        for name in ("gpu", "grace")
        for cell in _cells(name, 1)
        for way in (PLAIN, DRAFTED)
    }
    assert speeds["gpu", PLAIN] == speeds["grace", PLAIN]
    assert speeds["gpu", DRAFTED] > speeds["grace", DRAFTED] > 1.05 * speeds["grace", PLAIN]


def _cells(drafter: str, batch: int) -> list[Cell]:
    point = {"use": [drafter], "workload.batch": batch}
    data = GRACE.model_dump(mode="json") | {
        "sweep": {path: [value] for path, value in point.items()}
    }
    return Experiment.model_validate(data).cells()
