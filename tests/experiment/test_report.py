"""The report of simulated runs: its files, its tables and its answer."""

import csv
import json
import shutil
import sys
from pathlib import Path
from statistics import median

import pytest

from outrider_bench.commands.report import main
from outrider_bench.experiment.records import Folder
from outrider_bench.experiment.report.answers import answers
from outrider_bench.experiment.report.results import read
from outrider_bench.experiment.report.tables import tables
from tests.experiment import simulated_runs

PNG = b"\x89PNG\r\n\x1a\n"
Row = dict[str, str]


class WithoutMatplotlib:
    """Makes matplotlib seem not installed."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name == "matplotlib":
            raise ModuleNotFoundError("No module named 'matplotlib'", name=name)


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Map an experiment's name to the folder of the report of a simulated run."""
    found = {}
    for settings, sources, repetitions in (
        (simulated_runs.ROUND_TRIP, ("measured", "predicted"), 1),
        (simulated_runs.PLACEMENT, ("measured",), 3),
    ):
        path = tmp_path_factory.mktemp(settings["name"])
        simulated_runs.make_run(path, settings, repetitions=repetitions, sources=sources)
        assert main([str(path)]) == 0
        found[settings["name"]] = path / "report"
    return found


def lines_of(report: Path, title: str) -> list[dict[str, str]]:
    """Return the lines of a table, each keyed by the titles of the columns."""
    results = read(Folder(report.parent))
    [table] = [table for table in tables(results) if table.title == title]
    return [dict(zip(table.columns, line, strict=True)) for line in table.lines]


def said_in(report: Path) -> str:
    """Return the sentences of a report."""
    return " ".join(answers(read(Folder(report.parent))))


def rows_of(report: Path) -> list[Row]:
    with (report / "figures.csv").open() as file:
        return list(csv.DictReader(file))


def test_a_report_without_matplotlib_has_all_but_the_plot(
    reports: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    whole = reports[simulated_runs.ROUND_TRIP["name"]]
    assert (whole / "speed.png").read_bytes().startswith(PNG)
    run = tmp_path / "run"
    shutil.copytree(whole.parent, run)
    shutil.rmtree(run / "report")
    for module in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.delitem(sys.modules, "outrider_bench.experiment.report.plots")
    monkeypatch.setattr(sys, "meta_path", [WithoutMatplotlib(), *sys.meta_path])
    assert main([str(run)]) == 0
    assert "no plot: matplotlib is missing" in capsys.readouterr().out
    assert rows_of(run / "report") == rows_of(whole)
    assert not (run / "report/speed.png").exists()


def test_ratios_of_the_table_are_medians_of_figures_csv(reports: dict[str, Path]) -> None:
    report = reports["placement"]
    for line in lines_of(report, "Speed"):
        values = [
            float(row["times_plain"])
            for row in rows_of(report)
            if (row["sweep.use"], row["way"]) == (line["use"], "drafted")
        ]
        assert line["× plain"] == f"{median(values):.2f} ({min(values):.2f}–{max(values):.2f})"


def test_figures_csv_has_a_row_for_each_way_and_repetition(reports: dict[str, Path]) -> None:
    rows = rows_of(reports["placement"])
    places = [(row["cell"], row["way"], row["repetition"]) for row in rows]
    assert len(set(places)) == len(places) == 6 * 2 * 3


def test_predicted_figures_are_marked(reports: dict[str, Path]) -> None:
    speeds = lines_of(reports["round-trip"], "Speed")
    assert all(float(line["predicted"]) > 0 for line in speeds)
    assert "predicted" not in lines_of(reports["placement"], "Speed")[0]


def test_acceptance_is_shown_by_position_family_and_kind(reports: dict[str, Path]) -> None:
    lines = lines_of(reports["placement"], "Acceptance by position and kind")
    shown = {line["of"]: line for line in lines if line["use"] == "far"}
    assert {"all", "family far", "kind any"} <= set(shown)
    first, second = (float(shown["all"][f"at {i}"]) for i in (1, 2))
    assert 0.2 < second < first < 1.0
    # All drafts are of one drafter and one kind.
    assert shown["all"] | {"of": ""} == shown["family far"] | {"of": ""}
    row = next(row for row in rows_of(reports["placement"]) if row["sweep.use"] == "far")
    assert "accepted_at_1" in row
    assert "family_far_accepted_at_1" in row


def test_differing_greedy_texts_and_missing_cells_are_named(
    reports: dict[str, Path], tmp_path: Path
) -> None:
    assert "equal across all ways" in said_in(reports["placement"])
    copy = tmp_path / "run"
    shutil.copytree(reports["placement"].parent, copy)
    [(number, measured), *_] = Folder(copy).measurements("use=far")
    measured.texts_sha256 = "another"
    Folder(copy).save("use=far", number, measured)
    shutil.rmtree(copy / "cells" / "use=socket")
    said = said_in(copy / "report")
    assert "Greedy texts differ between ways or repetitions in: far." in said
    assert "1 of 6 cells have no result yet." in said


@pytest.mark.parametrize(
    ("about", "reason"),
    [
        (None, "run.json: No such file"),
        ({}, "the field 'experiment' is missing"),
        ({"experiment": {"name": "x", "colour": "red"}}, "experiment.colour: there is no such"),
        ({"experiment": {"name": "x"}}, "no cell of the experiment has a measurement"),
    ],
)
def test_a_folder_that_is_no_run_is_refused(
    about: object, reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if about is not None:
        (tmp_path / "run.json").write_text(json.dumps(about))
    with pytest.raises(SystemExit) as stopped:
        main([str(tmp_path)])
    assert stopped.value.code == 2
    assert reason in capsys.readouterr().err
