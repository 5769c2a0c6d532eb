"""Two runs side by side: what their repetitions show, and what else differs."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import pytest
from simulated_runs import MACHINE

from outrider_bench.commands.report import compare
from outrider_bench.experiment.records import DRAFTED, PLAIN, Folder, Measurement
from outrider_bench.experiment.report.comparison import Line, lines, warnings
from outrider_bench.experiment.report.results import read
from outrider_bench.experiment.spec import Experiment
from outrider_bench.intervals import ratio_interval
from outrider_bench.sample import Sample


def run(
    path: Path,
    drafted: Sequence[int],
    *,
    commit: str = "0123abc",
    host: str = "rig",
    batch: int = 1,
    load: float = 0.5,
) -> Folder:
    """A run of one cell: plain decoding has 100 tokens/s in each repetition."""
    settings = {"name": "hand-made", "drafters": {"near": {}}, "use": ["near"]}
    experiment = Experiment.model_validate({**settings, "workload": {"batch": batch}})
    folder = Folder(path)
    folder.begin(
        {
            "machine": {**asdict(MACHINE), "host": host},
            "load": load,
            "commit": commit,
            "experiment": experiment.model_dump(mode="json"),
        }
    )
    for number, rate in enumerate(drafted):
        folder.save("only", number, Measurement(PLAIN, [Sample(100, 1.0)]))
        folder.save("only", number, Measurement(DRAFTED, [Sample(rate, 1.0)]))
    return folder


def test_tokens_per_second_under_different_loads_are_not_compared(tmp_path: Path) -> None:
    quiet = read(run(tmp_path / "a", [150, 152, 148, 151]))
    busy = read(run(tmp_path / "b", [110, 112, 108, 111], load=4.0))
    verdicts = {line.figure: line.verdict for line in lines(quiet, busy)}
    assert verdicts["drafted, tokens/s"] == verdicts["plain, tokens/s"] == "cannot tell"
    assert verdicts["drafted, × plain"] == "slower"
    assert "the loads differ: 0.5 and 4.0 processes" in " ".join(warnings(quiet, busy))


def compared(tmp_path: Path, first: Sequence[int], second: Sequence[int]) -> dict[str, Line]:
    folders = [run(tmp_path / name, rates) for name, rates in (("a", first), ("b", second))]
    return {line.figure: line for line in lines(*[read(folder) for folder in folders])}


@pytest.mark.parametrize(
    ("first", "second", "verdict"),
    [
        ([150, 152, 148, 151], [170, 172, 168, 171], "faster"),
        ([170, 172, 168, 171], [150, 152, 148, 151], "slower"),
        ([150, 152, 148, 151], [149, 153, 147, 152], "cannot tell"),
        # A single repetition has no interval.
        ([150], [170], "cannot tell"),
    ],
)
def test_the_interval_decides_what_is_said(
    first: list[int], second: list[int], verdict: str, tmp_path: Path
) -> None:
    found = compared(tmp_path, first, second)
    assert found["drafted, tokens/s"].verdict == verdict
    assert found["drafted, × plain"].verdict == verdict
    assert found["plain, tokens/s"].verdict == "cannot tell"
    assert found["plain, tokens/s"].ratio == 1.0


def test_the_interval_is_that_of_the_medians_ratio() -> None:
    # Two draws of [100, 110] have the median 100, 105 or 110; draws of [200] have the median 200.
    assert ratio_interval([200.0, 200.0], [100.0, 110.0]) == pytest.approx((200 / 110, 2.0))
    assert ratio_interval([3.0], [2.0]) == (1.5, 1.5)


def test_predictions_are_told_apart_without_repetitions(tmp_path: Path) -> None:
    folders = []
    for name, rate in (("a", 150), ("b", 151)):
        folder = run(tmp_path / name, [])
        for way, tokens in ((PLAIN, 100), (DRAFTED, rate)):
            folder.save("only", 0, Measurement(way, [Sample(tokens, 1.0)]), predicted=True)
        folders.append(folder)
    [_, drafted, _] = lines(*[read(folder) for folder in folders])
    assert drafted.verdict == "faster"


def test_what_differs_beside_the_figures_is_named(tmp_path: Path) -> None:
    first = read(run(tmp_path / "a", [150, 151]))
    assert list(warnings(first, first)) == []
    second = read(run(tmp_path / "b", [150, 151], commit="fedcba9", host="other", batch=2))
    assert sorted(warnings(first, second)) == [
        "the commits differ: 0123abc and fedcba9",
        "the experiments differ: workload",
        "the machines differ: host is rig and other",
    ]


def test_the_command_prints_ratios_and_warnings(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folders = [
        run(tmp_path / "a", [150, 152, 148]),
        run(tmp_path / "b", [170, 172, 168], commit="fedcba9"),
    ]
    assert compare([str(folder.path) for folder in folders]) == 0
    said = capsys.readouterr().out
    assert "warning: the commits differ" in said
    [line] = [line for line in said.splitlines() if "drafted, tokens/s" in line]
    assert "1.13 (1.11–1.16)" in line
    assert "faster" in line


def test_runs_without_a_cell_in_common_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one = run(tmp_path / "a", [150])
    other = run(tmp_path / "b", [])
    experiment = Experiment.model_validate(
        {"name": "x", "sweep": {"workload.batch": [1, 2]}, "use": []}
    )
    about = other.about() | {"experiment": experiment.model_dump(mode="json")}
    (other.path / "run.json").write_text(json.dumps(about))
    other.save("batch=2", 0, Measurement(PLAIN, [Sample(100, 1.0)]))
    with pytest.raises(SystemExit) as caught:
        compare([str(one.path), str(other.path)])
    assert caught.value.code == 2
    assert "have no cell in common" in capsys.readouterr().err
