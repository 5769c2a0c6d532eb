"""The report of simulated runs: its files, its page and its answer."""

import csv
import json
import re
import shutil
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from importlib.util import find_spec
from pathlib import Path
from statistics import median

import pytest
import simulated_runs
import yaml
from click.testing import CliRunner

from outrider.launch.cli import app
from outrider_bench.experiment.records import Folder
from outrider_bench.experiment.report import main, validation

PNG = b"\x89PNG\r\n\x1a\n"
Row = dict[str, str]


class Page(HTMLParser):
    """Collects a page's addresses, and the numbers of its tables with their sources."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.addresses: list[str] = []
        self.numbers: list[tuple[Row, str]] = []
        self.words = ""
        self._line: Row = {}
        self._number: Row | None = None
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        loaded = [values[name] for name in ("src", "srcset", "href", "action") if name in values]
        self.addresses += loaded
        if tag == "tr":
            self._line = values
        self._number = {**self._line, **values} if values.get("data-figure") else self._number
        if self._number is not None and tag == "td":
            self.numbers.append((self._number, ""))

    def handle_endtag(self, tag: str) -> None:
        if tag == "td":
            self._number = None

    def handle_data(self, data: str) -> None:
        self.words += data
        if self._number is not None:
            place, text = self.numbers.pop()
            self.numbers.append((place, text + data))


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A run of each kind with its report, by the experiment's name."""
    found = {}
    for settings, sources in (
        (simulated_runs.ROUND_TRIP, ("measured", "predicted")),
        (simulated_runs.PLACEMENT, ("measured",)),
        (simulated_runs.OUTAGE, ("measured",)),
        (simulated_runs.TURNS, ("predicted",)),
    ):
        path = tmp_path_factory.mktemp(settings["name"])
        simulated_runs.make_run(path, settings, sources=sources)
        assert main([str(path)]) == 0
        found[settings["name"]] = path / "report"
    return found


def page_of(report: Path) -> Page:
    return Page((report / "index.html").read_text())


def rows_of(report: Path) -> list[Row]:
    with (report / "figures.csv").open() as file:
        return list(csv.DictReader(file))


def answer_of(report: Path) -> str:
    return " ".join(json.loads((report / "report.json").read_text())["answer"])


def stated(rows: list[Row], place: Row) -> Iterator[float]:
    """The values in figures.csv for a number of the page."""
    keys = {name: place[f"data-{name}"] for name in ("cell", "source", "way", "verifier")}
    for row in rows:
        if all(row[name] == value for name, value in keys.items()) and row[place["data-figure"]]:
            yield float(row[place["data-figure"]])


def test_the_page_loads_nothing_from_elsewhere(reports: dict[str, Path]) -> None:
    for report in reports.values():
        text = (report / "index.html").read_text()
        addresses = page_of(report).addresses
        outside = [found for found in addresses if re.match(r"(?!data:)([a-z]+:|//)", found)]
        assert addresses
        assert not outside
        assert "<script" not in text
        assert "@import" not in text
        assert "url(" not in text


def test_files_that_the_page_names_are_there(reports: dict[str, Path]) -> None:
    for report in reports.values():
        files = [link for link in page_of(report).addresses if not link.startswith("data:")]
        assert any(link.endswith("run.json") for link in files)
        for link in files:
            name = link.replace("%3D", "=").replace("%2C", ",").replace("%2B", "+")
            assert (report / name).is_file(), link


def test_every_number_of_the_tables_is_in_figures_csv(reports: dict[str, Path]) -> None:
    for report in reports.values():
        rows, numbers = rows_of(report), page_of(report).numbers
        assert len(numbers) > 20
        for place, text in numbers:
            values = list(stated(rows, place))
            shown = re.findall(r"\d+(?:\.\d+)?", text)
            expected = [median(values), min(values), max(values)][: len(shown)]
            digits = len(shown[0].partition(".")[2])
            assert shown == [f"{value:.{digits}f}" for value in expected], (place, text)


def test_figures_csv_has_a_row_for_each_verifier_and_for_all(reports: dict[str, Path]) -> None:
    rows = rows_of(reports["pool"])
    places = [(row["cell"], row["way"], row["repetition"], row["verifier"]) for row in rows]
    assert len(set(places)) == len(places) == 2 * 2 * 1 * 3
    assert {row["sweep.use"] for row in rows} == {"own", "shared"}


def test_predicted_figures_are_marked(reports: dict[str, Path]) -> None:
    page = page_of(reports["pool"])
    assert {place["data-source"] for place, _ in page.numbers} == {"predicted"}
    assert {place["class"] for place, _ in page.numbers} == {"predicted"}
    assert answer_of(reports["pool"]).count("(predicted)") >= 4
    assert "(predicted)" not in answer_of(reports["placement"])


def test_the_plots_follow_the_sweep(reports: dict[str, Path]) -> None:
    pictures = {name: sorted(report.glob("*.png")) for name, report in reports.items()}
    names = {name: [file.stem for file in files] for name, files in pictures.items()}
    assert names == {
        "round-trip": ["break-even", "heat-map", "speed", "step", "validation"],
        "placement": ["cells", "heat-map", "step"],
        "outage": ["speed", "step", "timeline"],
        "pool": ["cells", "step", "turns"],
    }
    for files in pictures.values():
        assert all(file.read_bytes().startswith(PNG) for file in files)


def test_the_answer_of_round_trips_names_speeds_and_break_even(reports: dict[str, Path]) -> None:
    said = answer_of(reports["round-trip"])
    assert re.search(r"model, no bandwidth limit: 1\.\d\d at 0 ms, .* breaks even at \d", said)
    assert "Beside colocated drafting" in said
    assert "Predictions of 48 speeds are off by" in said


def test_the_answer_of_an_outage_says_when_the_speed_is_back(reports: dict[str, Path]) -> None:
    said = answer_of(reports["outage"])
    assert re.search(r"stop of model at 2 s: .* is back after 1\.\d s", said)
    assert "reset of wire at 5 s: the requests ended too soon" in said


def test_the_answer_of_turns_says_how_much_more_is_accepted(reports: dict[str, Path]) -> None:
    said = answer_of(reports["pool"])
    assert re.search(r"own: .*: 1\.00 × as many", said)
    assert re.search(r"shared: .*: [23]\.\d\d × as many", said)


def test_each_event_has_its_own_line(reports: dict[str, Path]) -> None:
    figures = {place["data-figure"] for place, _ in page_of(reports["outage"]).numbers}
    assert {"event_1_recovery_s", "event_2_watched_s", "longest_gap_s"} <= figures
    assert "stop of model at 2 s" in page_of(reports["outage"]).words


def test_requests_that_come_by_themselves_are_judged_by_time_per_token(tmp_path: Path) -> None:
    workload = {**simulated_runs.OUTAGE["workload"], "arrivals": "poisson", "waves": 2}
    settings = {**simulated_runs.OUTAGE, "workload": workload, "events": []}
    simulated_runs.make_run(tmp_path, settings, repetitions=1)
    assert main([str(tmp_path)]) == 0
    said = answer_of(tmp_path / "report")
    assert re.search(r"tokens/s follow the demand. Plain decoding takes 1\.\d\d–1\.\d\d × as", said)


def test_differing_greedy_texts_are_named(reports: dict[str, Path], tmp_path: Path) -> None:
    assert "equal across all ways" in answer_of(reports["placement"])
    copy = tmp_path / "run"
    shutil.copytree(reports["placement"].parent, copy)
    [(number, measured), *_] = Folder(copy).measurements("use=far")
    measured.texts_sha256 = "another"
    Folder(copy).save("use=far", number, measured)
    assert main([str(copy)]) == 0
    assert "Greedy texts differ between ways or repetitions in: far." in answer_of(copy / "report")


def test_validation_agrees_with_the_report(reports: dict[str, Path]) -> None:
    report = reports["round-trip"]
    written = json.loads((report / "report.json").read_text())["validation"]
    found = validation(Folder(report.parent))
    assert written["median_error"] == found.median_error
    assert len(found.rows) == len(written["rows"]) == 48


def test_parquet_is_written_where_pyarrow_is(
    reports: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(reports["pool"].parent), "--out", str(tmp_path)]) == 0
    installed = find_spec("pyarrow") is not None
    assert (tmp_path / "figures.parquet").exists() is installed
    assert ("pyarrow is not installed" in capsys.readouterr().out) is not installed


def test_a_file_means_its_latest_run(tmp_path: Path) -> None:
    settings = {**simulated_runs.TURNS, "repetitions": 1}
    file, runs = tmp_path / "pool.yaml", tmp_path / "runs"
    file.write_text(yaml.safe_dump(settings))
    for name, began in (("one", "2026-01-02"), ("two", "2026-01-01")):
        folder = simulated_runs.make_run(runs / "pool" / name, settings, repetitions=1)
        about = {**folder.about(), "began": began}
        (folder.path / "run.json").write_text(json.dumps(about))
    assert main([str(file), "--runs", str(runs)]) == 0
    assert (runs / "pool" / "one" / "report" / "index.html").is_file()
    assert not (runs / "pool" / "two" / "report").exists()


@pytest.mark.parametrize(
    ("about", "reason"),
    [
        (None, "run.json: No such file"),
        ({}, "the field 'experiment' is missing"),
        ({"experiment": {"name": "x", "colour": "red"}}, "experiment.colour: Extra inputs are not"),
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


def test_a_run_in_progress_says_how_much_is_missing(
    reports: dict[str, Path], tmp_path: Path
) -> None:
    copy = tmp_path / "run"
    shutil.copytree(reports["placement"].parent, copy)
    shutil.rmtree(copy / "cells" / "use=far")
    assert main([str(copy)]) == 0
    assert "1 of 6 cells have no result yet." in answer_of(copy / "report")


def test_a_report_without_a_plotting_library_says_what_to_install(
    reports: dict[str, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`make demo` installs the models' libraries alone."""
    module = "outrider_bench.experiment.report.plots"
    monkeypatch.setitem(sys.modules, module, None)
    run = CliRunner().invoke(app, ["experiment", "report", str(reports["pool"].parent)])
    assert run.exit_code == 2
    assert "in Outrider's sources, pip install '.[bench]'" in run.output + capsys.readouterr().err
