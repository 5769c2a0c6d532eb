"""Every step of `bench/gpu.sh` runs at small size on a CPU. A killed step keeps its results.

The slow tests run the script, whose steps load torch.
"""

from __future__ import annotations

import csv
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from outrider_bench.gpu.__main__ import _tables
from outrider_bench.gpu.decisions import decisions
from outrider_bench.gpu.result_lines import Lines

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "bench/gpu.sh"


def run(step: str, out: Path, *arguments: str, script: Path = SCRIPT) -> str:
    """Run a step and return its output; raise CalledProcessError if it fails."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    # On busy cores, threads wait for each other.
    environment = {**os.environ, "OUT": str(out), "PATH": path, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [str(script), step, *arguments], env=environment, capture_output=True, text=True, check=True
    )
    return done.stdout


def lines_of(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "lines.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_forwards_are_measured_and_their_table_is_printed(tmp_path: Path) -> None:
    printed = run("steps", tmp_path)
    assert "steps: estimated " in printed.splitlines()[0]
    found = lines_of(tmp_path)
    for what, figure in {"target": "share", "draft model": "eager_ms"}.items():
        assert [line[figure] for line in found if line["what"] == what and figure in line]
    table = (tmp_path / "tables.md").read_text()
    assert table in printed
    rows = list(csv.DictReader((tmp_path / "figures.csv").read_text().splitlines()))
    assert len(rows) == len(re.findall(r"^\| (?!what|---)", table, re.MULTILINE))


@pytest.mark.slow
def test_the_stack_step_measures_drafters_beside_plain_decoding(tmp_path: Path) -> None:
    printed = run("stack", tmp_path)
    assert printed.startswith("stack: estimated ")
    assert (tmp_path / "stack.txt").read_text() in printed
    rows = list(csv.DictReader((tmp_path / "stack.csv").read_text().splitlines()))
    drafted = {row["sweep.use"]: row for row in rows if row["way"] == "drafted"}
    assert {name: float(row["times_plain"]) > 0 for name, row in drafted.items()} == dict.fromkeys(
        ("head", "inside", "ngram", "beside", "host"), True
    )
    assert (tmp_path / "runs.tgz").stat().st_size > 0
    decided = run("decisions", tmp_path)
    for name in ("head", "inside", "beside"):
        found = float(drafted[name]["times_plain"])
        assert f"| {found:.2f} |" in next(line for line in decided.splitlines() if name in line)
    assert "| ngram | 32 | 1.11 | – | – | – | not measured |" in decided


@pytest.mark.slow
def test_the_test_step_runs_pytest_without_its_plug_ins(tmp_path: Path) -> None:
    printed = run("test", tmp_path, "-p", "no:asyncio", "-k", "row_of_nans")
    assert "1 passed" in printed
    assert (tmp_path / "tests.txt").read_text() in printed


@pytest.mark.parametrize(("times_plain", "so"), [("2.1", "as planned"), ("1.2", "below 2: ")])
def test_a_figure_of_the_stack_decides_by_its_bar(
    times_plain: str, so: str, tmp_path: Path
) -> None:
    columns = "way,sweep.use,sweep.workload.batch,tokens_per_s,times_plain,step_ms,step_wait_ms\n"
    first, second = ("plain,head,1,170,,5.9,0.1\n", f"drafted,head,1,340,{times_plain},9,3\n")
    (tmp_path / "stack-first.csv").write_text(columns + first + second)
    (tmp_path / "stack-second.csv").write_text(columns + "drafted,ngram,32,1,,9,3\n")
    lines = decisions(tmp_path).splitlines()
    [head] = [line for line in lines if line.startswith("| head | 1 |")]
    assert head.startswith(
        f"| head | 1 | 2.15 | {float(times_plain):.2f} | 9.00 ms | 3.00 ms | {so}"
    )
    assert "| ngram | 32 | 1.11 | – | – | – | not measured |" in lines
    assert "| plain, beside head | 1 | – | 170 tokens/s | 5.90 ms | 0.10 ms | – |" in lines


def test_every_word_by_which_a_call_chooses_tests_finds_some() -> None:
    [words] = re.findall(r'"\$0" test -k "(.*)"', SCRIPT.read_text())
    step = [path for path in (ROOT / "tests/lm").glob("test_*.py") if "cuda" in path.read_text()]
    names = re.findall(r"def (test_\w+)", "".join(path.read_text() for path in step))
    for word in words.split(" or "):
        assert [name for name in names if word in name], word


def test_a_line_is_on_the_disk_before_the_next_figure(tmp_path: Path) -> None:
    lines = Lines(tmp_path / "lines.jsonl", "steps", 0.0)
    lines.say("target", ms=1.5)
    assert lines_of(tmp_path) == [{"step": "steps", "what": "target", "ms": 1.5}]
    with pytest.raises(TimeoutError):
        lines.check()


def test_figures_of_a_cell_are_joined_and_a_newer_one_counts(tmp_path: Path) -> None:
    cell = {"batch": 1, "context": 8, "tokens": 5}
    lines = Lines(tmp_path / "lines.jsonl", "steps", 9.0)
    lines.say("target", **cell, eager_ms=9.0, graph_ms=3.0)
    lines.say("target", **cell, graph_ms=2.0)
    _tables(tmp_path)
    [*_, row] = (tmp_path / "tables.md").read_text().strip().splitlines()
    assert row == "| target | 1 | 8 | 5 | 9 | 2 |"


LACKING = {"connectrpc", "cryptography", "fastapi", "google.protobuf", "grpc", "httptools"}
LACKING |= {"jsonschema", "llguidance", "opentelemetry", "pydantic", "redis", "uvicorn"}
"""Modules that the GPU's machine lacks, or has in versions that the project does not accept."""


@pytest.mark.slow
def test_the_steps_need_no_package_that_the_gpus_machine_lacks() -> None:
    code = f"import sys\nsys.modules.update(dict.fromkeys({LACKING}))\n"
    code += "import outrider_bench.gpu.steps"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_pack_fails_above_63_mib(tmp_path: Path) -> None:
    script = tmp_path / "bench/gpu.sh"
    script.parent.mkdir()
    shutil.copy(SCRIPT, script)
    subprocess.run(["git", "init", "--quiet", str(tmp_path)], check=True)
    assert "in all, of 63" in run("pack", tmp_path / "bench/out", script=script)
    with (tmp_path / "weights").open("wb") as file:
        file.truncate(64 * 2**20)
    with pytest.raises(subprocess.CalledProcessError):
        run("pack", tmp_path / "bench/out", script=script)
