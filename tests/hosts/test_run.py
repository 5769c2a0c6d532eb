"""`outrider lab run` measures on real processes and goes on after an interruption."""

from __future__ import annotations

import dataclasses
import io
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rich.console import Console

from outrider_bench.commands.run import main
from outrider_bench.experiment import machine, run
from outrider_bench.experiment.measuring import _carried
from outrider_bench.experiment.records import DRAFTED, PLAIN, Folder, LinkTraffic, Measurement
from outrider_bench.experiment.report import answers, results
from outrider_bench.experiment.run import missing, open_folder
from outrider_bench.experiment.spec import Experiment, load
from outrider_bench.sample import Sample

_SMALL = Path(__file__).parents[2] / "bench/experiments/small.yaml"


def _experiment() -> Experiment:
    return load(_SMALL)


def test_each_machine_commit_and_experiment_has_its_own_folder(tmp_path: Path) -> None:
    experiment, here = _experiment(), machine.this_machine()
    folders = {
        Folder.of(tmp_path, experiment, here, "abc").path,
        Folder.of(tmp_path, experiment, here, "abc+dirty").path,
        Folder.of(tmp_path, experiment, dataclasses.replace(here, host="elsewhere"), "abc").path,
        Folder.of(tmp_path, experiment.model_copy(update={"repetitions": 5}), here, "abc").path,
    }
    assert len(folders) == 4
    assert Folder.of(tmp_path, experiment, here, "abc").path in folders


def test_a_run_says_that_it_does_not_mix_with_earlier_ones(tmp_path: Path) -> None:
    (tmp_path / "small/0123abcd-older-01234567").mkdir(parents=True)
    console = Console(file=io.StringIO(), width=200)
    folder = open_folder(tmp_path, _experiment(), console, "outrider lab run small.yaml")
    assert isinstance(console.file, io.StringIO)
    assert "1 earlier run was of another machine, commit or file" in console.file.getvalue()
    assert folder.about()["experiment"]["name"] == "small"


def test_a_run_records_its_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def measure_nothing(*_: object) -> None:
        pass

    monkeypatch.setattr(run, "measure", measure_nothing)
    monkeypatch.setattr(machine, "warnings", list[str])
    monkeypatch.setattr(results, "read", lambda _: None)
    monkeypatch.setattr(answers, "answers", lambda _: [])
    out = tmp_path / "a folder"
    arguments = [str(_SMALL), "--out", str(out)]
    assert main(arguments) == 0
    capsys.readouterr()
    [folder] = (out / "small").iterdir()
    command = Folder(folder).about()["command"]
    assert shlex.split(command) == ["outrider", "lab", "run", *arguments]


def test_saved_measurements_are_not_missing(tmp_path: Path) -> None:
    experiment = _experiment()
    folder = Folder(tmp_path)
    cells = experiment.cells()
    before = missing(experiment, cells, folder)
    folder.save(cells[0].key, 1, Measurement(DRAFTED, Sample(1, 1.0)))
    assert set(before) - set(missing(experiment, cells, folder)) == {(cells[0].key, DRAFTED, 1)}
    assert len(before) == 2 * 2 * 2


def test_traffic_is_the_growth_of_a_links_counters() -> None:
    before, after = LinkTraffic(10, 20, 1, 0), LinkTraffic(15, 40, 1, 2)
    assert _carried({"wire": before}, {"wire": after}) == {"wire": LinkTraffic(5, 20, 0, 2)}


@pytest.mark.parametrize(
    ("content", "problem"), [("name: [", "file.yaml"), ("name: a\ncolour: 1\n", "colour")]
)
def test_a_wrong_file_ends_with_status_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str, problem: str
) -> None:
    (tmp_path / "file.yaml").write_text(content)
    with pytest.raises(SystemExit) as raised:
        main([str(tmp_path / "file.yaml")])
    assert raised.value.code == 2
    assert problem in capsys.readouterr().err


def _start(out: Path) -> subprocess.Popen[str]:
    """Run the small experiment with one repetition, which has four measurements."""
    file = out / "small.yaml"
    file.write_text(_SMALL.read_text().replace("repetitions: 2", "repetitions: 1"))
    command = [
        sys.executable,
        "-m",
        "outrider_cli.main",
        "lab",
        "run",
        str(file),
        "--out",
        str(out),
    ]
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "COLUMNS": "200"},
        # A shell's background job ignores Ctrl-C, and so would its children.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def _saved(out: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in out.glob("small/*/cells/*/*.json")}


@pytest.mark.slow
def test_an_interrupted_run_goes_on_and_all_texts_are_equal(tmp_path: Path) -> None:
    first = _start(tmp_path)
    deadline = time.monotonic() + 240
    while not _saved(tmp_path) and first.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    first.send_signal(signal.SIGINT)
    said, _ = first.communicate(timeout=60)
    assert first.returncode == 130, said
    assert "to go on, run the same command again" in said
    before = _saved(tmp_path)
    assert 1 <= len(before) < 4

    second = _start(tmp_path)
    said, _ = second.communicate(timeout=300)
    assert second.returncode == 0, said
    after = _saved(tmp_path)
    assert len(after) == 4
    assert {path: after[path] for path in before} == before

    [folder] = (tmp_path / "small").iterdir()
    cells = [cell.key for cell in _experiment().cells()]
    found = {key: list(Folder(folder).measurements(key)) for key in cells}
    assert "The highest speed is that of " in said
    measurements = [measurement for pairs in found.values() for _, measurement in pairs]
    assert not [error for measurement in measurements for error in measurement.errors]
    assert len({measurement.texts_sha256 for measurement in measurements}) == 1
    for _, measurement in found["use=far"]:
        assert measurement.cpu_s["verifier-1"] > 0
        if measurement.way == PLAIN:
            assert measurement.links == {}
            continue
        assert measurement.links["wire"].up_bytes > 0
