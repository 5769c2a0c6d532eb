"""The report of simulated runs: its files, its page and its answer."""

import csv
import json
import re
import shutil
import sys
from html.parser import HTMLParser
from pathlib import Path
from statistics import median

import pytest
import simulated_runs

from outrider_bench.commands.report import main
from outrider_bench.experiment.records import Folder

PNG = b"\x89PNG\r\n\x1a\n"
Row = dict[str, str]


class Page(HTMLParser):
    """Collects a page's pictures, and its tables' lines and other words."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.pictures: list[str] = []
        self.lines: list[list[str]] = []
        self.words = ""
        self._in_cell = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._in_cell = tag in ("td", "th")
        if tag == "tr":
            self.lines.append([])
        elif self._in_cell:
            self.lines[-1].append("")
        elif tag == "img":
            self.pictures.append(dict(attrs)["src"] or "")

    def handle_endtag(self, tag: str) -> None:
        self._in_cell = False

    def handle_data(self, data: str) -> None:
        self.words += data
        if self._in_cell:
            self.lines[-1][-1] += data


class WithoutMatplotlib:
    """Finds no matplotlib, as where it is not installed."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name == "matplotlib":
            raise ModuleNotFoundError("No module named 'matplotlib'", name=name)


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A run of each kind with its report, by the experiment's name."""
    found = {}
    for settings, sources, repetitions in (
        (simulated_runs.ROUND_TRIP, ("measured", "predicted"), 1),
        (simulated_runs.PLACEMENT, ("measured",), 3),
        (simulated_runs.TWO, ("predicted",), 1),
    ):
        path = tmp_path_factory.mktemp(settings["name"])
        simulated_runs.make_run(path, settings, repetitions=repetitions, sources=sources)
        assert main([str(path)]) == 0
        found[settings["name"]] = path / "report"
    return found


def page_of(report: Path) -> Page:
    return Page((report / "index.html").read_text())


def rows_of(report: Path) -> list[Row]:
    with (report / "figures.csv").open() as file:
        return list(csv.DictReader(file))


def test_a_page_shows_the_plot_of_its_sweep_and_loads_nothing_else(
    reports: dict[str, Path],
) -> None:
    for report in reports.values():
        page = page_of(report)
        assert page.pictures == ["speed.png"]
        assert all((report / name).read_bytes().startswith(PNG) for name in page.pictures)
        assert not re.search(r"<script|https?:|@import|url\(", (report / "index.html").read_text())


def test_a_report_without_matplotlib_has_all_but_the_plot(
    reports: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    whole = reports[simulated_runs.ROUND_TRIP["name"]]
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
    assert page_of(run / "report").pictures == []


def test_ratios_of_the_page_are_medians_of_figures_csv(reports: dict[str, Path]) -> None:
    report = reports["placement"]
    lines = page_of(report).lines
    heads = lines[0]
    for use in ("own-core", "far"):
        line = next(line for line in lines if line[0] == use)
        shown = line[heads.index("× plain")]
        values = [
            float(row["times_plain"])
            for row in rows_of(report)
            if (row["sweep.use"], row["way"], row["verifier"]) == (use, "drafted", "all")
        ]
        assert shown == f"{median(values):.2f} ({min(values):.2f}–{max(values):.2f})"


def test_figures_csv_has_a_row_for_each_verifier_and_for_all(reports: dict[str, Path]) -> None:
    rows = rows_of(reports["two"])
    places = [(row["cell"], row["way"], row["repetition"], row["verifier"]) for row in rows]
    assert len(set(places)) == len(places) == 2 * 2 * 1 * 3
    assert {row["sweep.use"] for row in rows} == {"own", "shared"}


def test_predicted_figures_are_marked(reports: dict[str, Path]) -> None:
    page = page_of(reports["two"])
    assert any("predicted" in line for line in page.lines)
    assert not any("measured" in line for line in page.lines)
    assert "(predicted)" in page.words
    assert "(predicted)" not in page_of(reports["placement"]).words


def test_acceptance_is_shown_by_position_family_and_kind(reports: dict[str, Path]) -> None:
    lines = page_of(reports["placement"]).lines
    heads = next(line for line in lines if "at 1" in line)
    shown = {line[1]: line for line in lines if len(line) == len(heads) and line[0] == "far"}
    assert {"all", "family far", "kind any"} <= set(shown)
    [first, second] = (float(shown["all"][heads.index(f"at {i}")]) for i in (1, 2))
    assert 0.2 < second < first < 1.0
    # One drafter and one kind have all drafts.
    assert shown["all"][3:] == shown["family far"][3:]
    row = next(row for row in rows_of(reports["placement"]) if row["sweep.use"] == "far")
    assert "accepted_at_1" in row
    assert "family_far_accepted_at_1" in row


def test_the_answer_of_round_trips_names_speeds_and_break_even(reports: dict[str, Path]) -> None:
    said = page_of(reports["round-trip"]).words
    assert re.search(r"model, mbit_s 0: 1\.\d\d at 0 ms, .* breaks even at \d", said)


def test_verifiers_have_lines_of_their_own(reports: dict[str, Path]) -> None:
    lines = page_of(reports["two"]).lines
    heads = next(line for line in lines if "accepted per forward" in line)
    place = heads.index("accepted per forward")
    first, second = (
        float(next(line for line in lines if line[:2] == ["shared", f"verifier {n}"])[place])
        for n in (1, 2)
    )
    assert second > 2 * first


def test_differing_greedy_texts_and_missing_cells_are_named(
    reports: dict[str, Path], tmp_path: Path
) -> None:
    assert "equal across all ways" in page_of(reports["placement"]).words
    copy = tmp_path / "run"
    shutil.copytree(reports["placement"].parent, copy)
    [(number, measured), *_] = Folder(copy).measurements("use=far")
    measured.texts_sha256 = "another"
    Folder(copy).save("use=far", number, measured)
    shutil.rmtree(copy / "cells" / "use=socket")
    assert main([str(copy)]) == 0
    said = page_of(copy / "report").words
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
